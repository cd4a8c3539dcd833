"""How often the verdicts of ``mezzo compare`` are wrong, by simulation.

Losses and metrics whose truth is known are judged by the functions that judge runs:

``differences``  equivalent and different, with the true difference at the margin
``metrics``      the same for metrics that come as counts or printed digits
``courses``      diverged and stopped learning: false alarms on noise without a trend, and what is found
``promises``     whether as many seeds as promised decide

A rate is that of the worst of many settings, simulated once more by itself: the largest of many estimates would be too large. Everything is
seeded. Takes eight minutes on one core.
"""

from __future__ import annotations

from benchmarks.harness import report
from benchmarks.verdicts import courses, differences, metrics, promises
from benchmarks.verdicts.rates import Rate

FULL = 1.0


def rows(effort: float = FULL) -> list[Rate]:
    """Return all rates; ``effort`` scales the number of simulated comparisons."""
    return [*differences.rates(effort), *metrics.rates(effort), *courses.rates(effort), *promises.rates(effort)]


def main() -> None:
    """Simulate, print and write the table."""
    found = rows()
    report("verdicts", [(r.what, r.text, r.aim) for r in found], {"rates": {r.what: r.share for r in found}})
