"""How often the verdicts of ``mezzo compare`` are wrong, by simulation.

Losses and metrics whose truth is known are judged by the functions that judge runs:

``differences``  equivalent and different, with the true difference at the margin
``metrics``      the same for metrics that are counts or have few printed digits
``courses``      diverged and stopped learning: false alarms on noise without a trend, and the faults that are found
``promises``     whether the number of seeds that an undecided verdict names really decides

A rate is that of the worst of many settings, which is simulated once more alone: the largest of many estimates would be too large.
Everything is seeded. Takes eight minutes on one core.
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
