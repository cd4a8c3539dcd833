"""A script that runs out of memory: what occupied it, counted by hand; a script's own handling of the error is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from helpers_launch import run_in_child
from helpers_values import existing
from mezzo.launch.torch.out_of_memory import OPTIMIZER, is_out_of_memory, memory_settings, saved_by_graphs
from mezzo.records import RunRecord
from paths import SCRIPTS

WEIGHTS = 4 * (64 * 256 + 256 + 256 * 8 + 8)
FIRST, LAST = 4 * (64 * 256 + 256), 4 * (256 * 8 + 8)


def ran(folder: Path, *arguments: str, policy: str = "fp32") -> RunRecord:
    return run_in_child(folder, str(SCRIPTS / "out_of_memory.py"), *arguments, policy=policy)


def test_what_held_the_memory_is_counted_by_kind_and_module(tmp_path: Path) -> None:
    record = ran(tmp_path, "fake", "4")
    found = existing(record.out_of_memory)
    assert (record.exit_code, found.step, found.asked_bytes) == (1, 4, int(2.5 * 2**30))
    steps = 4 * 4  # Adam's step count of each of four tensors
    # The last step's graph is freed; the graph of this one keeps the input and the result of ReLU.
    assert found.held_bytes == {
        "parameters": WEIGHTS,
        "gradients": WEIGHTS,
        "optimizer state": 2 * WEIGHTS + steps,
        "saved activations": 4 * (128 * 64 + 128 * 256),
    }
    assert [(one.name, one.bytes) for one in found.modules] == [("0", 4 * FIRST + 8), ("3", 4 * LAST + 8)]
    assert "OutOfMemoryError: CUDA out of memory" in (tmp_path / "output.log").read_text()


def test_settings_come_with_the_bytes_that_they_save(tmp_path: Path) -> None:
    found = existing(ran(tmp_path, "fake", "4").out_of_memory)
    assert 4 * (128 * 64 + 128 * 256 + 128 * 8) == 164 * 2**10  # what a step keeps
    written = {one.value: one.reason.partition(":")[0] for one in found.settings}
    assert written == {
        'mezzo.AdamW(..., moments="8bit")': "saves 110 KiB",
        "mezzo.checkpoint(model, sample, budget=...)": "saves 164 KiB",
        'half the batch: Session(micro_batch="auto"), or accumulate=2': "saves 82 KiB",
        "--policy bf16": "saves 82 KiB",
    }
    assert [one.what for one in found.not_known] == ["activations by module", "other"]


def test_before_a_whole_step_that_is_said(tmp_path: Path) -> None:
    found = existing(ran(tmp_path, "fake", "1", policy="bf16").out_of_memory)
    assert found.held_bytes["gradients"] == found.held_bytes["optimizer state"] == 0
    assert "activations of a step" in [one.what for one in found.not_known]
    assert "--policy bf16" not in [one.value for one in found.settings]


def test_a_real_error_of_the_cpu_is_read(tmp_path: Path) -> None:
    record = ran(tmp_path, "really", "3")
    assert record.out_of_memory is not None
    assert record.out_of_memory.asked_bytes == 4 * 2**46
    assert record.out_of_memory.step == 3


def test_a_script_that_catches_the_error_goes_on_untouched(tmp_path: Path) -> None:
    record = ran(tmp_path, "caught", "3")
    assert (record.exit_code, len(record.steps), record.out_of_memory) == (0, 6, None)
    assert (tmp_path / "output.log").read_text().splitlines()[:2] == ["half a batch", "finished"]


def test_other_errors_are_none_of_this() -> None:
    assert not is_out_of_memory(RuntimeError("shapes"))
    assert not is_out_of_memory(None)
    assert is_out_of_memory(MemoryError())


def test_a_freed_graph_holds_nothing() -> None:
    layer = nn.Linear(4, 4)
    loss = layer(torch.ones(2, 4)).relu().sum()
    assert [*saved_by_graphs([loss])]
    loss.backward()
    assert [*saved_by_graphs([loss])] == []


# --- Settings that save memory name the bytes that they save in a unit with three digits ---


MIB = 2**20


@pytest.mark.parametrize(
    ("optimizer_bytes", "saved"), [(1000 * MIB, "750 MiB"), (1364 * MIB, "0.999 GiB"), (4096 * MIB, "3 GiB")]
)
def test_saved_bytes_have_three_digits(optimizer_bytes: int, saved: str) -> None:
    (setting,) = memory_settings({OPTIMIZER: optimizer_bytes}, lowers=True, step_activations=None)
    assert setting.reason.startswith(f"saves {saved}: ")
