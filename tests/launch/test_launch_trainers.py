"""Unmodified scripts of Lightning, Fabric, Accelerate and Hugging Face's Trainer under ``run`` and the five other commands.

The commands' child processes are run in this one: importing a trainer takes longer than everything that is tested here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import helpers_launch
from helpers_launch import AS_IS, PLAIN, Ran, children_in_this_process
from helpers_values import record_at
from mezzo.cli import main
from mezzo.records import (
    AuditRecord,
    CompareRecord,
    DiagnoseRecord,
    FallbackRecord,
    RangesRecord,
    RunRecord,
    read_record,
)
from paths import SCRIPTS

pytest.importorskip("lightning")
state = pytest.importorskip("accelerate.state")
pytest.importorskip("transformers")

UPDATES = 12
FLOPS = 3 * 2 * 8 * (6 * 16 + 16 * 2) - 2 * 8 * 6 * 16  # forward, two backward products, none for the inputs' gradient
SCENARIOS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Trainer": ("lightning_trainer", ()),
    "Trainer in 16-mixed": ("lightning_trainer", ("--precision", "16-mixed")),
    "Fabric": ("lightning_fabric", ()),
    "Fabric in bf16-mixed": ("lightning_fabric", ("bf16-mixed",)),
    "Accelerate": ("accelerate_loop", ()),
    "Accelerate in bf16": ("accelerate_loop", ("--precision", "bf16")),
    "Hugging Face": ("hf_trainer", ()),
    "Hugging Face in bf16": ("hf_trainer", ("--precision", "bf16")),
}
ACCUMULATING = {
    "Trainer": ("lightning_trainer", ("--accumulate", "5")),
    "Accelerate": ("accelerate_loop", ("--accumulate", "5")),
    "Hugging Face": ("hf_trainer", ("--accumulate", "5")),
}
# Units in the last place; Fabric in bf16-mixed casts its inputs to BF16 as well.
UNIT = {"fp32": 2.0**-23, "fp16": 2.0**-11, "fp16-master": 2.0**-11, "bf16": 2.0**-8}


def ran(script: str, policy: str, *arguments: str) -> Ran:
    begin_anew()
    return helpers_launch.ran(script, policy, *arguments)


def begin_anew() -> None:
    """Forget what Accelerate keeps for the whole process."""
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()


@pytest.fixture(autouse=True, scope="module")
def _leave_nothing() -> Iterator[None]:
    yield
    begin_anew()


@functools.cache
def plain(script: str, *arguments: str) -> Ran:
    return ran(script, PLAIN, *arguments)


def assert_close(found: Sequence[float], expected: Sequence[float], tolerance: float) -> None:
    assert len(found) == len(expected)
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= tolerance


# --- under a policy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", UNIT)
@pytest.mark.parametrize("name", SCENARIOS)
def test_losses_follow_the_script_in_fp32(name: str, policy: str) -> None:
    script, arguments = SCENARIOS[name]
    found, expected = ran(script, policy, *arguments), plain(script)
    unit = UNIT["bf16"] if name == "Fabric in bf16-mixed" else UNIT[policy]
    assert_close(found.losses, expected.losses, 4 * unit)
    assert found.values["rates"] == expected.values["rates"]
    assert found.values["steps"] == len(found.steps) == UPDATES
    assert found.steps.num_skipped == 0
    assert found.steps.loss_scale == ([65536.0] * UPDATES if policy.startswith("fp16") else [])
    assert found.effective.flops_by_format == {policy.removesuffix("-master"): FLOPS}
    assert found.reasons == []
    assert found.findings == []
    assert_close(found.steps.loss, found.losses, 1e-6)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_script_as_it_is_is_only_watched(name: str) -> None:
    script, arguments = SCENARIOS[name]
    found, expected = ran(script, AS_IS, *arguments), plain(script, *arguments)
    assert found.losses == expected.losses
    own = {"16-mixed": "fp16", "bf16-mixed": "bf16", "bf16": "bf16"}.get("".join(arguments[-1:]), "fp32")
    assert found.effective.flops_by_format == {own: FLOPS}
    assert found.steps.loss_scale == ([65536.0] * UPDATES if own == "fp16" else [])
    assert found.findings == []


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_skipped_update_is_as_if_it_had_not_happened(name: str) -> None:
    script, arguments = SCENARIOS[name]
    found = ran(script, "fp16:init_scale=1048576", *arguments)
    expected = ran(script, "fp16", *arguments)
    skipped = found.steps.num_skipped
    assert 3 <= skipped <= 6
    assert found.steps.skipped == [True] * skipped + [False] * (UPDATES - skipped)
    assert found.steps.loss_scale == [2.0 ** (20 - min(k + 1, skipped)) for k in range(UPDATES)]
    assert found.losses[:skipped] == [found.losses[0]] * skipped  # one training step an update, no more
    assert found.losses[skipped:] == expected.losses[: UPDATES - skipped]  # scales are powers of two
    rates = expected.values["rates"][: UPDATES - skipped]
    assert found.values["rates"][skipped:] == rates  # the schedule waited
    assert all(map(math.isnan, found.steps.grad_norm[:skipped]))


@pytest.mark.parametrize("name", ACCUMULATING)
def test_windows_of_accumulation_are_one_update(name: str) -> None:
    script, arguments = ACCUMULATING[name]
    found, expected = ran(script, "fp16", *arguments), plain(script, *arguments)
    assert_close(found.losses, expected.losses, 4 * UNIT["fp16"])
    assert found.values["steps"] == len(found.steps) == 3  # 5, 5 and 2 of 12 micro-batches
    assert found.steps.skipped == [False] * 3
    short = ["A624"] if name in ("Trainer", "Accelerate") else []  # they divide the window of 2 by 5
    as_is = ran(script, AS_IS, *arguments)
    assert [finding.code for finding in found.findings] == short == [finding.code for finding in as_is.findings]
    skipping = ran(script, "fp16:init_scale=16777216", *arguments)
    assert skipping.steps.skipped == [True] * 3
    assert skipping.steps.loss_scale == [2.0**23, 2.0**22, 2.0**21]
    assert max(skipping.losses) - min(skipping.losses) < 1e-6  # Hugging Face logs their mean


# --- under the commands ------------------------------------------------------------------------------------------------------

SCRIPTS_OF = {"Trainer": "lightning_trainer", "Fabric": "lightning_fabric", "Accelerate": "accelerate_loop"}
SCRIPTS_OF["Hugging Face"] = "hf_trainer"
ON_ALL = pytest.mark.parametrize("script", SCRIPTS_OF.values(), ids=SCRIPTS_OF)
ON_TWO = pytest.mark.parametrize("script", ["lightning_trainer", "accelerate_loop"])
"""A trainer that has the loop, with a closure for the optimizer, and a library that leaves it to the script."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with children_in_this_process(before_each=begin_anew):
        yield tmp_path


def record_of(folder: Path, command: str, script: str, *options: str) -> Any:
    """Give a command to Mezzo and return the record that it leaves beside its page."""
    code = main([command, *options, "--out", str(folder), str(SCRIPTS / f"{script}.py")])
    assert code == 0
    assert (folder / "report.html").stat().st_size > 1000
    return read_record(folder / "record.json")


@ON_ALL
def test_run(script: str, folder: Path) -> None:
    record = record_of(folder, "run", script, "--policy", "fp16")
    assert isinstance(record, RunRecord)
    assert (len(record.steps), record.exit_code, record.final_scale) == (UPDATES, 0, 65536.0)
    assert record.effective.flops_by_format == {"fp16": FLOPS}
    assert record.effective.emulated


@ON_TWO
def test_compare(script: str, folder: Path) -> None:
    record = record_of(folder, "compare", script, "--policies", "fp32,fp16", "--seeds", "1")
    assert isinstance(record, CompareRecord)
    found = [(run.policy, len(run.steps), run.error) for run in record.runs]
    assert found == [("fp32", UPDATES, None), ("fp16", UPDATES, None)]


@ON_ALL
def test_audit(script: str, folder: Path) -> None:
    record = record_of(folder, "audit", script, "--policy", "fp16", "--at", "2")
    assert isinstance(record, AuditRecord)
    assert [(p.op, p.phase, p.m, p.n, p.k, p.format) for p in record.products] == [
        ("addmm", "forward", 8, 16, 6, "fp16"),
        ("mm", "wgrad", 16, 6, 8, "fp16"),
        ("addmm", "forward", 8, 2, 16, "fp16"),
        ("mm", "dgrad", 8, 16, 2, "fp16"),
        ("mm", "wgrad", 2, 16, 8, "fp16"),
    ]
    assert record.flops_by_format == {"fp16": FLOPS}


@ON_TWO
def test_diagnose(script: str, folder: Path) -> None:
    record = record_of(folder, "diagnose", script, "--policy", "fp16", "--steps", "4")
    assert isinstance(record, DiagnoseRecord)
    assert (record.verdict, record.run.error, len(record.run.steps)) == ("healthy", None, 4)
    assert [p.reason for p in record.passes] == ["to find the first step that is not finite"]


def test_a_fault_is_found_inside_the_closure_that_a_trainer_hands_to_the_optimizer(folder: Path) -> None:
    """The Trainer's forward pass runs inside ``optimizer.step``, whose own operations no observer records."""
    script = str(SCRIPTS / "lightning_trainer.py")
    assert main(["diagnose", "--steps", "4", "--out", str(folder), script, "--factor", "1e6"]) == 1
    record = record_at(folder / "record.json", DiagnoseRecord)
    found = (record.verdict, record.module, record.phase, record.step)
    assert found == ("range_overflow", "0", "forward", 1)
    assert "lightning_trainer.py:" in (record.line or "")


@ON_TWO
def test_ranges(script: str, folder: Path) -> None:
    record = record_of(folder, "ranges", script)
    assert isinstance(record, RangesRecord)
    assert {t.kind for t in record.tensors} >= {"weights", "updates", "weight gradients", "activations"}
    assert [(w.format, w.empty) for w in record.windows if w.format == "fp16"] == [("fp16", False)]


@ON_TWO
def test_fallback(script: str, folder: Path) -> None:
    record = record_of(folder, "fallback", script)
    assert isinstance(record, FallbackRecord)
    assert record.verdict == "not needed"
