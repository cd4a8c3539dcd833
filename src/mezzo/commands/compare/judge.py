"""Decide whether two policies train equally well, from paired runs.

Runs with different seeds end at different losses, so one run per policy shows nothing. Runs are paired by seed (in their order, if they
repeat a seed or have none), and each policy is compared with the baseline over the seeds that trained under both.

``pairing``      which runs belong together
``series``       a run's losses by name, its final loss, its last metric
``dependence``   runs that read what an earlier run wrote
``trends``       runs that diverged or stopped learning
``scales``       the scales on which values are compared; ``kinds``: the scale that suits a metric, and the step of its values
``margins``      the largest difference that still counts as equivalent
``quantities``   what pairs show: intervals, tests for a difference and for equivalence; ``gathering``: quantities from runs
``seeds``        how many seeds would decide
``skips``        skipped updates, in words; ``costs``: time and memory
``baseline``     the runs with which all others are compared
``verdicts``     the verdict and its reasons; ``words``: numbers in them

A run's final loss is the mean of the finite losses in the last tenth of its steps. Imports no torch and reads no files. The design
decisions are explained in docs/design/comparing.md.
"""

from __future__ import annotations

import math
from typing import Any

from mezzo.commands.compare.baseline import Baseline
from mezzo.commands.compare.costs import cost_notes, memory_ratio, time_facts, why_not_timed
from mezzo.commands.compare.pairing import LOSS, Group, grouped, mean
from mezzo.commands.compare.quantities import Quantity
from mezzo.commands.compare.verdicts import Judged, judge
from mezzo.errors import MezzoError, PolicyError, nearest
from mezzo.records import CompareRecord, Row, RunRecord


def compare(runs: list[RunRecord], *, baseline: str, margin: float, command: list[str]) -> CompareRecord:
    """Return a row and a verdict for each policy among ``runs``, in order of first appearance.

    Args:
        runs: runs of one script, failed ones included.
        baseline: policy text of the runs to compare with.
        margin: difference that counts as equivalent, as a share of the baseline's value (see ``margins``).
        command: what was typed.

    Raises:
        PolicyError: no run has the baseline's policy.
        MezzoError: the margin is not a number above 0.
    """
    groups = grouped(runs)
    if baseline not in groups:
        ran = nearest(baseline, groups) if groups else "there is no run at all"
        raise PolicyError(
            f"baseline {baseline!r} is not a policy that was run; {ran}",
            hint="add it to --policies, or choose a baseline among them",
        )
    if not (math.isfinite(margin) and margin > 0):
        raise MezzoError(
            f"margin={margin!r}; allowed: a number above 0",
            hint="0.02 stands for 2% of the baseline's final loss",
        )
    base = Baseline.of(groups[baseline], runs=runs, margin=margin)
    trained = next((run for group in groups.values() for run in group.trained.values()), runs[0])
    return CompareRecord(
        command=command,
        baseline=baseline,
        margin=margin,
        rows=[_row(group, base=base) for group in groups.values()],
        runs=runs,
        shared_files=[dependence.record() for dependence in base.dependences],
        environment=trained.environment,
    )


def _row(group: Group, *, base: Baseline) -> Row:
    judged = judge(group, base=base)
    row = Row(
        policy=group.policy,
        policy_typed=group.typed,
        checkpoint=group.checkpoint,
        num_runs=group.num_runs,
        num_failed=len(group.failed),
        verdict=judged.verdict,
        reason="; ".join(judged.reasons),
        evidence="; ".join(judged.reasons),
        seeds_cannot_decide=judged.seeds_cannot_decide,
        seeds_needed=judged.seeds_needed,
    )
    if not group.trained:
        return row
    facts = _facts(group, base=base)
    notes = [] if group is base.group or judged.is_void else cost_notes(facts, baseline=base.group.name)
    untimed = "" if facts["emulated"] else why_not_timed(group.pairs(base.group.trained))
    others = [untimed] if untimed else []
    said = {
        "reason": "; ".join([*judged.reasons, *notes, *others]),
        "evidence": "; ".join([*judged.reasons, *others]),
    }
    return row.model_copy(update=facts | _compared(judged) | said)


def _facts(group: Group, *, base: Baseline) -> dict[str, Any]:
    """Return the facts of a row besides its verdict, over the seeds that also trained under the baseline; times over all that trained."""
    pairs = group.pairs(base.group.trained)
    runs = [pair.run for pair in pairs] or list(group.trained.values())
    facts = {
        "emulated": any(run.effective.emulated for run in runs),
        "memory": runs[0].memory,
        "memory_ratio": memory_ratio(pairs),
        "share_by_format": runs[0].effective.share_by_format,
        "num_skipped": mean(run.steps.num_skipped for run in runs),
        "final_scale": runs[0].final_scale,
    }
    return facts | time_facts(list(group.trained.values()), list(base.group.trained.values()), pairs)


def _compared(judged: Judged) -> dict[str, Any]:
    losses = {q.name: q.record() for q in judged.quantities if not q.is_metric}
    metric: Quantity | None = next((q for q in judged.quantities if q.is_metric), None)
    return {
        "loss": losses.get(LOSS) if len(losses) < 2 else None,
        "losses": losses if len(losses) > 1 or LOSS not in losses else {},
        "metric": None if metric is None else metric.record(),
    }
