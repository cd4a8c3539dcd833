"""Which runs of a comparison depend on an earlier one, because they read what it wrote after its first update.

A script that saves a checkpoint and resumes from it if there is one turns several runs in one folder into one long training.
Each run has recorded which files it read that were written after the comparison began and before the run itself. A file written after
the first update of an earlier run carries that run's training; one written before, such as a prepared data set, does not.
File systems with a resolution of one or two seconds date a file that much too early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mezzo.records import FILE_CLOCK_TICK_S, FileRead, RunRecord, SharedFile

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
            f"{self.written_by} had written; give each run a path of its own with {{run}} in the script's arguments, as in "
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
