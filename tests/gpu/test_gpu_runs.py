"""``mezzo run`` on a GPU: the losses, skipped updates and times of a script under every policy, against the loop written by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from gpu_jobs import NEEDS_A_GPU, Ask, Job, mezzo, plan
from loop_script import BUSY_CYCLES, BUSY_STEP, OVERFLOWS, STEPS

HIGHEST_CLOCK_HZ = 4e9
"""More than any GPU's: what it cannot go below in ``BUSY_CYCLES``."""


@dataclass(frozen=True)
class Case:
    """A run, the precision of the loop by hand that it is compared with, and by how much losses may differ."""

    variant: str
    policy: str
    by_hand: str = "fp32"
    differ: float = 0.0
    own: str = "fp32"
    """What the script sets by itself."""

    def __str__(self) -> str:
        return f"{self.variant} {self.policy}" + (f" own {self.own}" if self.own != "fp32" else "")


# The same kernels in the same order: FP32 sums may be cut differently where a kernel is chosen for other memory (1e-5). BF16 and FP16
# may round once where the loop by hand does not (2**-8, 2**-10 of a value), which 40 updates carry on; compiled code rounds less often.
FP32, BF16, FP16, FUSED = 1e-5, 2.0**-8, 2.0**-9, 2.0**-5
CASES = [
    Case("plain", "as-is"),
    Case("plain", "fp32", differ=FP32),
    Case("plain", "tf32", "tf32", FP32),
    Case("plain", "bf16:op_lists=device", "bf16", BF16),
    Case("plain", "bf16", "bf16", BF16),
    Case("plain", "fp16:op_lists=device", "fp16", FP16),
    Case("plain", "fp16", "fp16", FP16),
    Case("plain", "bf16-master", "bf16", FUSED),
    Case("plain", "fp16-master", "fp16", FUSED),
    Case("scaler", "as-is", "fp16", own="fp16"),
    Case("scaler", "fp16", "fp16", FP16, own="fp16"),
    Case("scaler", "bf16", "bf16", BF16, own="fp16"),
    Case("compiled", "as-is", "fp32", 2.0**-10),
    Case("compiled", "bf16", "bf16", FUSED),
    Case("compiled", "fp16", "fp16", FUSED),
    Case("clip", "as-is"),
    Case("clip", "fp16", "fp16", FP16),
    Case("checkpoint", "bf16", "bf16", BF16),
    Case("checkpoint", "fp16", "fp16", FP16),
    Case("loader", "as-is"),
    Case("loader", "bf16", "bf16", BF16),
]
plan(
    "test_gpu_runs",
    **{
        str(case): mezzo("run", "--policy", case.policy, "{here}/loop_script.py", "{device}", case.variant, case.own)
        for case in CASES
    },
    by_hand=Job(("{here}/loop_script.py", "{device}", "by-hand")),
)
ON_A_CPU = ("scaler as-is own fp16", "clip fp16")
"""Each takes ten seconds there."""
every_run = pytest.mark.parametrize(
    ("case", "device"),
    [
        *(
            pytest.param(case, "cpu", id=f"{case} cpu", marks=pytest.mark.slow)
            for case in CASES
            if str(case) in ON_A_CPU
        ),
        *(pytest.param(case, "cuda", id=f"{case} cuda", marks=NEEDS_A_GPU) for case in CASES),
    ],
)


def expected(ended: Ask, case: Case, device: str) -> dict[str, list[float]]:
    """Return what the loop by hand gave: a compiled or loaded variant is the plain one."""
    variant = "plain" if case.variant in ("compiled", "loader") else case.variant
    lines = {(one["precision"], one["variant"]): one for one in ended("by_hand", device).well().said}
    return lines[case.by_hand, variant]


@every_run
def test_it_ends_well_and_the_record_names_the_device(ended: Ask, case: Case, device: str) -> None:
    record = ended(str(case), device).record
    assert record["environment"]["device"] == device
    assert (record["environment"]["gpu"] is not None) == (device == "cuda")
    assert len(record["steps"]["loss"]) == STEPS


@every_run
def test_losses_are_those_of_the_loop_by_hand(ended: Ask, case: Case, device: str) -> None:
    run = ended(str(case), device)
    losses = expected(ended, case, device)["losses"]
    assert run.record["steps"]["loss"] == pytest.approx(losses, rel=case.differ, abs=0)
    (said,) = run.said
    assert said["losses"] == pytest.approx(losses, rel=case.differ, abs=0)


@every_run
def test_as_many_updates_are_skipped_as_by_torchs_scaler(ended: Ask, case: Case, device: str) -> None:
    skipped = expected(ended, case, device)["skipped"]
    assert ended(str(case), device).record["steps"]["skipped"] == skipped
    scaled = case.by_hand == "fp16"
    assert [n for n, one in enumerate(skipped) if one] == (list(OVERFLOWS) if scaled else [])


@every_run
def test_times_are_those_of_the_device(ended: Ask, case: Case, device: str) -> None:
    """The host does not wait in the step that keeps the device busy: only events have its time."""
    run = ended(str(case), device)
    times_ms = run.record["steps"]["time_ms"]
    assert min(times_ms) > 0
    assert sum(times_ms) <= run.wall_s * 1e3
    if device == "cuda":
        assert times_ms[BUSY_STEP] >= BUSY_CYCLES / HIGHEST_CLOCK_HZ * 1e3


@every_run
def test_peak_memory_is_recorded_on_a_gpu(ended: Ask, case: Case, device: str) -> None:
    memory = ended(str(case), device).record["memory"]
    if device == "cuda":
        assert 0 < memory["parameters_bytes"] < memory["cuda_allocated_bytes"] <= memory["cuda_reserved_bytes"]
    else:
        assert memory["cuda_allocated_bytes"] is None
