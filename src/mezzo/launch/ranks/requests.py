"""A run's request for each process of a job: the same script and settings, files of its own. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

from mezzo.launch.request import Request


def record_path(folder: Path, number: int) -> Path:
    """Return where a process writes its record of a run, in its folder of the meeting."""
    return folder / f"run-{number}.json"


def counts_path(folder: Path, number: int) -> Path:
    """Return where a process writes the values that it counted."""
    return folder / f"run-{number}.counts.json"


def for_rank(request: Request, rank: int, *, folder: Path, number: int, ranks: int) -> Request:
    """Return the request of one rank, whose observer writes beside the files of rank 0, or into the rank's folder of the meeting.

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
        observe = observe.model_copy(update={"evidence_path": str(beside(Path(observe.evidence_path), rank))})
    if rank and observe is not None and observe.kind == "fallback":
        observe = observe.model_copy(update={"folder": str(folder_beside(Path(observe.folder), rank))})
        Path(observe.folder).mkdir(exist_ok=True)
    snapshots = request.snapshots
    if snapshots is not None:
        meeting = folder.parent / f"run-{number}-snapshots"
        meeting.mkdir(exist_ok=True)
        snapshots = snapshots.for_rank(rank, ranks=ranks, meeting=str(meeting))
    guard = None if request.guard is None else request.guard.model_copy(update={"together": ranks > 1})
    return request.model_copy(update={"rank": rank, "observe": observe, "snapshots": snapshots, "guard": guard})


def beside(path: Path, rank: int) -> Path:
    """Return a rank's own file beside one of rank 0."""
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def folder_beside(folder: Path, rank: int) -> Path:
    """Return a rank's own folder inside that of rank 0."""
    return folder / f"rank{rank}"


def files_of_ranks(path: Path) -> list[Path]:
    """Return an observer's file of rank 0 and those of other ranks beside it, in order."""
    name = re.compile(rf"{re.escape(path.stem)}\.rank(\d+){re.escape(path.suffix)}")
    places = path.parent.glob(f"*{path.suffix}")
    others = [(int(found[1]), place) for place in places if (found := name.fullmatch(place.name))]
    return [path, *(place for _, place in sorted(others))]
