"""What do fingerprints of all values, their errors in FP64 and mirrored rounding cost a step?

The script runs in a process of its own; steps 2 and 3 are recorded, and the median of the others is what they are compared with. Kinds are
interleaved. A training pays for three steps, however many follow: the last column is their cost as a share of 1,000 steps.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from benchmarks.shared.harness import report, spread, summary
from mezzo.launch.request import Request
from mezzo.launch.runner import run_child
from mezzo.observe.settings import ValuesSettings
from mezzo.policy import Policy

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = {"digits.py": ("--epochs", "2"), "stdlib_gpt.py": ("--steps", "40")}
KINDS = {"fingerprints": {}, "with errors in FP64": {"in_fp64": True}, "mirrored": {"mirrored": True}}
RUNS, RECORDED, STEPS, LONG = 5, (1, 2, 3), 30, 1000


def main() -> None:
    found: dict[str, list[float]] = {}
    for _ in range(RUNS):
        for script, arguments in SCRIPTS.items():
            for kind, settings in KINDS.items():
                found.setdefault(f"{script}, {kind}", []).append(_times(script, arguments, settings))
    rows = []
    for name, times in found.items():
        share = len(RECORDED) * (statistics.median(times) - 1) / LONG
        rows.append((name, f"{spread(summary(times), ' steps')}, {share:.1%} of {LONG:,} steps", "3 steps; 10%"))
    report("fingerprints", rows, {"steps": found})


def _times(script: str, arguments: tuple[str, ...], settings: dict[str, bool]) -> float:
    """Return the CPU time of a recorded step over an ordinary one: it counts the same on a busy machine."""
    with tempfile.TemporaryDirectory() as folder:
        values = ValuesSettings(steps=RECORDED, path=f"{folder}/values.npz", ends_script=False, **settings)  # type: ignore[arg-type]
        request = Request(
            target=str(EXAMPLES / script),
            kind="script",
            arguments=arguments,
            policy=Policy.parse("fp32"),
            record_path=f"{folder}/record.json",
            command=("benchmark",),
            observe=values,
            stop_after_steps=STEPS,
        )
        cpu_ms = run_child(request, output=Path(folder) / "log").steps.cpu_ms
    return statistics.median(cpu_ms[1:3]) / statistics.median(cpu_ms[5:])


if __name__ == "__main__":
    main()
