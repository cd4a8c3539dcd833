"""Torch's profiler beside Mezzo: a script that profiles itself keeps its profile, and processes with inspected steps end well.

On a CPU, ``tests/observe/audit/test_audit_profiles.py`` has the same in one process.
"""

from __future__ import annotations

import pytest
from gpu_jobs import CUDA, NEEDS_A_GPU, Ask, mezzo, plan
from profiler_script import KINDS, STEPS

AGAIN = 20
SCRIPT = ("{here}/profiler_script.py", "{device}")
# A script stops after the last step that is asked for; here it ends by itself before.
COMMANDS = {
    "run": ("run", "--policy", "bf16"),
    "audit": ("audit", "--policy", "bf16", "--at", f"2-5,{STEPS + 1}"),
    "audit of one step": ("audit", "--at", f"3,{STEPS + 1}"),
}
plan(
    "test_gpu_profilers",
    **{f"{name} {kind}": mezzo(*words, *SCRIPT, kind) for name, words in COMMANDS.items() for kind in KINDS},
    **{f"again {n}": mezzo("audit", "--at", "2-4", *SCRIPT, "none") for n in range(AGAIN)},
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("device", [CUDA])
def test_a_script_keeps_its_own_profile(ended: Ask, command: str, kind: str, device: str) -> None:
    run = ended(f"{command} {kind}", device).well()
    assert run.said[-1] == {"products": True, "kernels": True}
    record = run.record
    steps = record["run"]["steps"] if "run" in record else record["steps"]
    assert len(steps["loss"]) == STEPS


@pytest.mark.parametrize("number", range(AGAIN))
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_A_GPU)])
def test_a_process_with_inspected_steps_ends_well(ended: Ask, number: int, device: str) -> None:
    """Under a GPU that computes nothing some ended in kineto's destructor."""
    record = ended(f"again {number}", device).record
    assert record["kernels"]
