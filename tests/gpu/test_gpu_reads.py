"""How often the host waits for a real GPU in a step: by torch's own warnings, and by the calls that the profiler sees.

On a CPU nothing waits; there the programs run, and the counts are 0.
"""

from __future__ import annotations

from typing import Any

import pytest
from gpu_jobs import CUDA, NEEDS_A_GPU, Ask, Job, mezzo, plan
from reads_script import EARLY, LATE
from session_reads import SESSIONS

STEPS = 130
RUNS = [
    # the policy, the script, waits a step; None for as many as the script has by itself
    ("as-is", "plain", 0),
    ("as-is", "own", None),
    ("as-is", "fused", None),
    ("fp32", "plain", 0),
    ("tf32", "plain", 0),
    ("bf16", "plain", 0),
    ("bf16", "own", 0),
    ("bf16-master", "plain", 0),
    ("fp16", "plain", 1),
    ("fp16", "own", 1),
    ("fp16-master", "plain", 1),
]
SCRIPT = ("{here}/reads_script.py", "{device}")
plan(
    "test_gpu_reads",
    **{f"{policy} {kind}": mezzo("run", "--policy", policy, *SCRIPT, kind, str(STEPS)) for policy, kind, _ in RUNS},
    alone=Job((*SCRIPT, "each", str(STEPS))),
    sessions=Job(("{here}/session_reads.py", "{device}")),
)
every_run = pytest.mark.parametrize(
    ("policy", "kind", "waits", "device"),
    [
        pytest.param("fp16", "own", 0, "cpu", marks=pytest.mark.slow),
        *(pytest.param(*run, "cuda", marks=NEEDS_A_GPU) for run in RUNS),
    ],
)


def found(lines: list[dict[str, Any]], what: str, **named: str) -> Any:
    """Return ``what`` of the line that has these names and it."""
    (value,) = [one[what] for one in lines if what in one and named.items() <= one.items()]
    return value


def expected(ended: Ask, kind: str, waits: int | None, device: str) -> int:
    """Return waits a step of the script by itself, where none are given; the same in every step but the first."""
    if waits is not None:
        return waits
    alone = found(ended("alone", device).well().said, "waits", kind=kind)
    assert len(set(alone[EARLY])) == 1
    return int(alone[-1])


def is_profiled(counted: dict[str, Any]) -> bool:
    """Tell whether the profiler saw launches, which it does where CUPTI may count."""
    assert "error" not in counted, counted["error"]
    return bool(counted["launches"])


@every_run
def test_a_run_waits_for_the_scales_flag_alone(
    ended: Ask, policy: str, kind: str, waits: int | None, device: str
) -> None:
    counted = found(ended(f"{policy} {kind}", device).well().said, "waits", kind=kind)
    wanted = [expected(ended, kind, waits, device)] * 10
    assert counted[LATE] == wanted
    assert counted[EARLY] == wanted


@every_run
def test_the_profiler_sees_no_other_wait(ended: Ask, policy: str, kind: str, waits: int | None, device: str) -> None:
    counted = found(ended(f"{policy} {kind}", device).well().said, "profiled", kind=kind)
    if not is_profiled(counted):
        pytest.skip("the profiler saw no launch")
    if waits is None:
        alone = found(ended("alone", device).well().said, "profiled", kind=kind)
        assert counted["waits"] == alone["waits"]
    else:
        assert counted["waits"] == waits, counted["named"]


@pytest.mark.parametrize(("kind", "waits"), [("own", 1), ("fused", 0), ("plain", 0)])
@pytest.mark.parametrize("device", [CUDA])
def test_the_counter_counts_what_torchs_scaler_reads(ended: Ask, kind: str, waits: int, device: str) -> None:
    """A GradScaler reads one flag for an optimizer that is not fused."""
    assert found(ended("alone", device).well().said, "waits", kind=kind)[LATE] == [waits] * 10


@pytest.mark.parametrize(("policy", "optimizer", "waits"), SESSIONS)
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), CUDA])
def test_a_session_waits_with_torchs_optimizers_and_a_scale_alone(
    ended: Ask, policy: str, optimizer: str, waits: int, device: str
) -> None:
    counted = found(ended("sessions", device).said, "waits", policy=policy, optimizer=optimizer)
    wanted = [waits if device == "cuda" else 0] * 10
    assert counted[LATE] == wanted
    assert counted[EARLY] == wanted


@pytest.mark.parametrize(("policy", "optimizer", "waits"), SESSIONS)
@pytest.mark.parametrize("device", [CUDA])
def test_the_profiler_sees_no_other_wait_of_a_session(
    ended: Ask, policy: str, optimizer: str, waits: int, device: str
) -> None:
    counted = found(ended("sessions", device).said, "profiled", policy=policy, optimizer=optimizer)
    if not is_profiled(counted):
        pytest.skip("the profiler saw no launch")
    assert counted["waits"] == waits, counted["named"]
