"""The baseline of a comparison: its runs, which of them trained well, and what they learned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mezzo.measure.compare.dependence import Dependence, dependences
from mezzo.measure.compare.gathering import MetricKind
from mezzo.measure.compare.pairing import Group, Key
from mezzo.measure.compare.series import last_metric, losses_of, names_of, title_of
from mezzo.measure.compare.skips import skipped_at_the_end
from mezzo.measure.compare.trends import Fault, Learning, LossTrend, fault_of, not_finite
from mezzo.records import RunRecord


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The runs that every other policy is compared with."""

    group: Group
    margin: float
    """The requested margin, as a share."""
    names: list[str]
    """Names of the losses."""
    metric: MetricKind | None
    learning: dict[str, Learning]
    """How far the baseline's runs lowered each loss."""
    faults: dict[Key, Fault]
    """How runs of the baseline itself went wrong."""
    sound: dict[Key, RunRecord]
    """The runs that trained well."""
    dependences: list[Dependence]
    """Dependences of any run on another."""

    @classmethod
    def of(cls, group: Group, *, runs: Sequence[RunRecord], margin: float) -> Baseline:
        """Return the baseline whose runs are ``group``, in a comparison of ``runs``."""
        names, trained = names_of(group.trained.values()), group.trained
        series = {name: [losses_of(run).get(name, []) for run in trained.values()] for name in names}
        learning = {
            name: Learning([LossTrend(losses) for losses in known if losses and not_finite(losses, name=name) is None])
            for name, known in series.items()
        }
        faults = {
            key: fault for key, run in trained.items() if (fault := _fault_of(run, None, learning, baseline=group.name))
        }
        return cls(
            group=group,
            margin=margin,
            names=names,
            metric=MetricKind.of(runs),
            learning=learning,
            faults=faults,
            sound={key: run for key, run in trained.items() if key not in faults},
            dependences=dependences(runs),
        )

    def faults_of(self, group: Group) -> dict[Key, Fault]:
        """Return how the runs of another policy went wrong."""
        return {
            key: fault
            for key, run in group.trained.items()
            if (fault := _fault_of(run, self.sound.get(key), self.learning, baseline=self.group.name))
        }

    def explains(self, num_wrong: int, num_runs: int) -> bool:
        """Return whether the baseline's own runs went wrong at least as often; never if all ``num_runs`` did."""
        return num_wrong < num_runs and num_wrong * len(self.group.trained) <= len(self.faults) * num_runs


def _fault_of(
    run: RunRecord, partner: RunRecord | None, learning: dict[str, Learning], *, baseline: str
) -> Fault | None:
    """Return how ``run`` went wrong; ``partner`` is the baseline's run with its seed, None for a typical one."""
    for name, losses in losses_of(run).items():
        if (bad := not_finite(losses, name=title_of(name))) is not None:
            return Fault(verdict="diverged", text=bad)
    if num_skipped := skipped_at_the_end(run):
        many = f"its last {num_skipped} updates were all skipped"
        return Fault(verdict="stopped_learning", text="its last update was skipped" if num_skipped == 1 else many)
    for name, losses in losses_of(run).items():
        known = learning.get(name)
        if known is None or not known.trends:
            continue
        other = known.typical if partner is None else LossTrend(losses_of(partner).get(name, []))
        fault = fault_of(LossTrend(losses), other, known, name=title_of(name), baseline=baseline)
        if fault is not None:
            return fault
    return None if partner is None else _lost_metric(run, partner)


def _lost_metric(run: RunRecord, partner: RunRecord) -> Fault | None:
    ours, theirs = last_metric(run), last_metric(partner)
    if ours is None or theirs is None or math.isfinite(ours) or not math.isfinite(theirs) or run.metric is None:
        return None
    return Fault(verdict="diverged", text=f"the last {run.metric.name} is {ours}, where the baseline's is {theirs:.4g}")
