"""A run's request for each process of a job: the same script and settings, but separate files. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from mezzo.launch.request import Request
from mezzo.records.files import file_of_rank


def record_path(folder: Path, number: int) -> Path:
    """Return where a process writes its record of a run, in the process's folder of the meeting."""
    return folder / f"run-{number}.json"


def counts_path(folder: Path, number: int) -> Path:
    """Return where a process writes the values that it counted."""
    return folder / f"run-{number}.counts.json"


def for_rank(request: Request, rank: int, *, folder: Path, number: int, ranks: int) -> Request:
    """Return the request of one rank, whose observer writes next to the files of rank 0, or into the rank's folder of the meeting.

    Args:
        request: that of rank 0.
        rank: the rank.
        folder: the rank's folder of the meeting.
        number: the number of the run.
        ranks: the number of processes of the job.
    """
    observe = request.observe
    if observe is not None and observe.kind == "ranges":
        observe = observe.model_copy(update={"counts_path": str(counts_path(folder, number))})
    if rank and observe is not None and observe.kind == "diagnose" and observe.evidence_path:
        observe = observe.model_copy(update={"evidence_path": str(file_of_rank(Path(observe.evidence_path), rank))})
    if rank and observe is not None and observe.kind == "fallback":
        observe = observe.model_copy(update={"folder": str(folder_of_rank(Path(observe.folder), rank))})
        Path(observe.folder).mkdir(exist_ok=True)
    snapshots = request.snapshots
    if snapshots is not None:
        meeting = folder.parent / f"run-{number}-snapshots"
        meeting.mkdir(exist_ok=True)
        snapshots = snapshots.for_rank(rank, ranks=ranks, meeting=str(meeting))
    guard = None if request.guard is None else request.guard.model_copy(update={"together": ranks > 1})
    return request.model_copy(update={"rank": rank, "observe": observe, "snapshots": snapshots, "guard": guard})


def folder_of_rank(folder: Path, rank: int) -> Path:
    """Return a rank's own folder, inside that of rank 0."""
    return folder / f"rank{rank}"
