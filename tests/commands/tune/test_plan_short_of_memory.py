"""Runs that ended for lack of memory, each with its reason."""

from __future__ import annotations

import re
from typing import Any

import pytest

import record_builders as build
from mezzo.commands.tune.plan import short_of_memory
from mezzo.measure.checkpointing.wanted import bytes_text
from mezzo.measure.environment import host_bytes
from mezzo.records import Effective, Memory, OutOfMemory, RunRecord, Steps

ON_CPU = OutOfMemory(step=1, message="", asked_bytes=640_000_000_000)


def _ended(**fields: Any) -> RunRecord:
    steps = Steps(loss=[], loss_scale=[], skipped=[], grad_norm=[], time_ms=[], cpu_ms=[])
    known: dict[str, Any] = {
        "command": [],
        "script": "train.py",
        "script_sha256": "",
        "policy": "fp32",
        "seed": 0,
        "environment": build.environment(device="cpu"),
        "steps": steps,
        "memory": Memory(),
        "effective": Effective(flops_by_format={}),
        "explanation": [],
    }
    return RunRecord.model_validate(known | fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"out_of_memory": ON_CPU}, "it requested 596 GiB at once, which this machine, with"),
        ({"exit_code": -9}, "the system killed it (exit code -9), as it does when memory runs out"),
        ({"exit_code": 137}, "the system killed it (exit code 137), as it does when memory runs out"),
        (
            {"error": "OutOfMemoryError: no", "out_of_memory": OutOfMemory(step=1, message="no")},
            "OutOfMemoryError: no",
        ),
    ],
)
def test_a_run_that_lacked_memory_has_that_as_its_reason(fields: dict[str, Any], said: str) -> None:
    found = short_of_memory(_ended(**fields))
    assert found.startswith(said)
    assert (bytes_text(host_bytes()) in found) == (not found.startswith("OutOf"))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"error": "out of memory: you tried to allocate 640000000000 bytes"},
        {"error": "ValueError: bytes"},
        {"exit_code": 2},
        {"exit_code": -15},
    ],
)
def test_other_ends_are_not_about_memory(fields: dict[str, Any]) -> None:
    assert short_of_memory(_ended(**fields)) == ""


def test_the_memory_of_this_machine_is_the_kernels_own_figure() -> None:
    with open("/proc/meminfo", encoding="utf-8") as file:
        found = re.search(r"MemTotal:\s+(\d+) kB", file.read())
    assert found is not None
    assert host_bytes() == int(found[1]) * 1024
