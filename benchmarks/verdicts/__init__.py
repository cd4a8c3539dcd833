"""How often are the verdicts of ``mezzo compare``, ``fallback`` and ``diagnose`` wrong, by simulation?

Losses, metrics, errors of gradients and loss scales whose truth is known are judged by the functions that judge runs:

``differences``  equivalent and different, with the true difference at the margin
``metrics``      the same for metrics that are counts or have few printed digits
``courses``      diverged and stopped learning: false alarms on noise without a trend, and the faults that are found
``promises``     whether the number of seeds that an undecided verdict names really decides
``modules``      modules of healthy trainings that ``fallback`` blames, and faults that it calls not needed
``scales``       loss scales that ``diagnose`` finds too low: false alarms and misses

A rate is the worst of many settings, which is simulated once more alone: the largest of many estimates would be too large.
Everything is seeded, and uses one core.
"""

from __future__ import annotations

from benchmarks.shared.harness import report
from benchmarks.verdicts import courses, differences, metrics, modules, promises, scales
from benchmarks.verdicts.rates import Rate

FULL = 1.0


def rows(effort: float = FULL) -> list[Rate]:
    """Return all rates; ``effort`` scales the number of simulated comparisons."""
    parts = (differences, metrics, courses, promises, modules, scales)
    return [rate for part in parts for rate in part.rates(effort)]


def main() -> None:
    found = rows()
    report("verdicts", [(r.what, r.text, r.aim) for r in found], {"rates": {r.what: r.share for r in found}})
