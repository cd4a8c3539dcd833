"""The baseline of a comparison: its runs, which of them trained well, and what they learned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mezzo.commands.compare.costs import skipped_at_the_end
from mezzo.commands.compare.pairing import Group, RunKey, last_metric, losses_of, names_of, title_of
from mezzo.commands.compare.trends import Fault, Learning, LossTrend, MetricKind, fault_of, not_finite
from mezzo.records import FILE_CLOCK_TICK_S, FileRead, RunRecord, SharedFile


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
    faults: dict[RunKey, Fault]
    """How runs of the baseline itself went wrong."""
    sound: dict[RunKey, RunRecord]
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

    def faults_of(self, group: Group) -> dict[RunKey, Fault]:
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


# A script that saves a checkpoint and resumes from it if there is one turns several runs in one folder into one long training.
# Each run has recorded which files it read that were written after the comparison began and before the run itself. A file written after
# the first update of an earlier run carries that run's training; one written before, such as a prepared data set, does not.
# File systems with a resolution of one or two seconds date a file that much too early.

_COARSEST_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Dependence:
    """A file with the run that wrote it and the later run that read it."""

    path: str
    writer: RunRecord
    """The reader itself for a file of an earlier attempt at the same run, which was stopped."""
    reader: RunRecord

    @property
    def written_by(self) -> str:
        """The run that wrote the file, by name."""
        return _named(self.writer) + (", in an attempt that was stopped," if self.writer is self.reader else "")

    def record(self) -> SharedFile:
        """Return the dependence as part of a record."""
        return SharedFile(path=self.path, written_by=self.written_by, read_by=_named(self.reader))

    def text(self) -> str:
        """Return a sentence on what happened and what to do."""
        return (
            f"its runs are not independent: the run of {_named(self.reader)} read {self.path}, which the run of "
            f"{self.written_by} had written. Give each run its own path with {{run}} in the script's arguments, as in "
            "--output_dir out/{run}, or let the script remove the file when it begins"
        )


def dependences(runs: Sequence[RunRecord]) -> list[Dependence]:
    """Return every file that makes one of ``runs`` depend on another, in the order of the runs."""
    found = []
    for reader in runs:
        for file in reader.files_read:
            writers = [run for run in runs if run is not reader and _wrote(run, file)]
            if writers:
                latest = max(writers, key=lambda run: run.started_at_s or 0.0)
                found.append(Dependence(path=file.path, writer=latest, reader=reader))
            elif _left_by_earlier_attempt(reader, file):
                found.append(Dependence(path=file.path, writer=reader, reader=reader))
    return found


def _wrote(run: RunRecord, file: FileRead) -> bool:
    """Return whether ``file`` was written while ``run`` trained, after its first update."""
    if run.started_at_s is None or not run.steps.time_ms:
        return False
    first_update, end = run.started_at_s + run.steps.time_ms[0] / 1e3, run.started_at_s + run.duration_s
    return first_update - _slack_s(file) <= file.written_at_s <= end + FILE_CLOCK_TICK_S


def _left_by_earlier_attempt(run: RunRecord, file: FileRead) -> bool:
    """Return whether ``file`` was written after the first update of an attempt at this run that was stopped."""
    return run.earlier_update_s is not None and file.written_at_s >= run.earlier_update_s - _slack_s(file)


def _slack_s(file: FileRead) -> float:
    return _COARSEST_S if file.written_at_s == int(file.written_at_s) else FILE_CLOCK_TICK_S


def _named(run: RunRecord) -> str:
    return run.policy_shown if run.seed is None else f"{run.policy_shown} with seed {run.seed}"
