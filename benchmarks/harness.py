"""Time pieces of code against each other on a machine that is not quiet.

Interleaved rounds: every piece runs once a round, in turn, and ratios are taken within a round, so that a machine that slows down slows
all of them down. Times are CPU times of the one thread, which another process's load changes least. Quoted are medians, with the
smallest and the largest.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from mezzo.measure.environment import environment

RESULTS = Path(__file__).parent / "results"
OF_ONE_MACHINE: dict[str, Any] = {"folder": True, "variables": {"TORCHINDUCTOR_CACHE_DIR": True, "PYTHONPATH": True}}
"""What of the environment is a path that says nothing to anybody else."""


def interleave(
    pieces: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    warmup: int = 2,
    around: Mapping[str, Callable[[], AbstractContextManager[Any]]] | None = None,
) -> dict[str, list[float]]:
    """Return the milliseconds of thread CPU time of every piece in every round.

    A piece named in ``around`` runs inside that context; entering and leaving it is not timed.
    """
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {name: [] for name in pieces}
    for number in range(warmup + rounds):
        for name, run in pieces.items():
            with (around or {}).get(name, nullcontext)():
                started = time.thread_time()
                run()
                took_ms = (time.thread_time() - started) * 1e3
            if number >= warmup:
                times[name].append(took_ms)
    return times


def ratio(times: Mapping[str, list[float]], of: str, to: str) -> dict[str, float]:
    """Return median, least and largest of the ratio of two pieces, round by round."""
    ratios = [a / b for a, b in zip(times[of], times[to], strict=True)]
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


BUILDS = 12
"""How often both sides of a comparison are built anew: how memory happens to lie favours one of them by a percent or two."""
_OUTSIDE = 2
"""Builds left out at either end of the interval: 96% of the intervals from the 3rd to the 10th of 12 hold the true median."""


def over_builds(ratios: Iterable[Iterable[float]]) -> dict[str, Any]:
    """Return the median over builds of each build's median ratio, and the interval of these medians."""
    medians = sorted(statistics.median(build) for build in ratios)
    return {
        "ratio": statistics.median(medians),
        "interval": [medians[_OUTSIDE], medians[-1 - _OUTSIDE]],
        "medians_of_builds": [round(median, 4) for median in medians],
    }


def median_ms(times: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the median milliseconds of every piece."""
    return {name: statistics.median(values) for name, values in times.items()}


def spread(value: Mapping[str, float], unit: str = "x") -> str:
    """Return a ratio as text: median (least to largest)."""
    return f"{value['median']:.2f}{unit} ({value['min']:.2f} to {value['max']:.2f})"


def report(name: str, rows: list[tuple[str, str, str]], data: dict[str, Any]) -> None:
    """Print rows of (what, measured, target) and write them with the environment to ``results/NAME.json``."""
    width = max(len(what) for what, _, _ in rows)
    print(f"\n{name}")
    for what, measured, target in rows:
        print(f"  {what:{width}}  {measured:34}  {target}")
    RESULTS.mkdir(exist_ok=True)
    record = {
        "name": name,
        "command": f"python -m benchmarks {name}",
        "environment": environment("cuda" if torch.cuda.is_available() else "cpu").model_dump(exclude=OF_ONE_MACHINE),
        "rows": [{"what": what, "measured": measured, "target": target} for what, measured, target in rows],
        **data,
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def chosen(argv: list[str]) -> list[str]:
    """Return the names of the benchmarks to run: those in ``argv``, or all that need no GPU."""
    return argv or [
        "agreement",
        "emulation",
        "session_overhead",
        "state_bytes",
        "host_time",
        "startup",
        "optimizers",
        "low_memory",
        "float64",
        "paper",
        "whole_step",
        "audit",
        "ranges",
        "diagnose",
        "trainers",
        "machine_code",
    ]


if __name__ == "__main__":
    sys.exit("run python -m benchmarks")
