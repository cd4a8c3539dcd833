"""A session's snapshots in several processes: each process saves to its own folder, and any number of processes can load them.

``rank-0-of-2/000007-update-00001200.safetensors``. A snapshot is whole if every process has it. Only the first process saves tensors
that are equal in all processes; each saves its own shards, random generators and position in the data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mezzo.engine.processes.replicas import bare
from mezzo.engine.snapshots.choosing import contents_at
from mezzo.engine.snapshots.folder import saved_in
from mezzo.engine.snapshots.randomness import random_states
from mezzo.engine.snapshots.sharded import whole
from mezzo.engine.state import SessionParts
from mezzo.errors import SnapshotError

_RANK = re.compile(r"rank-(\d+)-of-(\d+)")


class CompleteSnapshot(NamedTuple):
    """A snapshot that all processes of its run have."""

    number: int
    paths: list[Path]
    """By rank."""


def folder_of(folder: Path, rank: int, size: int) -> Path:
    """Return the folder that one of several processes saves to; for a single process, ``folder`` itself."""
    return folder if size == 1 else folder / f"rank-{rank}-of-{size}"


def complete_snapshots(folder: Path) -> list[CompleteSnapshot]:
    """Return the snapshots in ``folder`` that every process of their run has, the newest first."""
    if folder.is_file():
        return [CompleteSnapshot(0, [folder])]
    snapshots = []
    for size in sorted({1, *_sizes(folder)}):
        names = [{saved.path.name: saved for saved in saved_in(folder_of(folder, rank, size))} for rank in range(size)]
        for name in set.intersection(*map(set, names)):
            snapshots.append(CompleteSnapshot(names[0][name].number, [by_name[name].path for by_name in names]))
    return sorted(snapshots, reverse=True)


def last_number(folder: Path) -> int:
    """Return the largest number of any snapshot in ``folder``, of any process."""
    folders = [folder, *(folder_of(folder, rank, size) for size in _sizes(folder) for rank in range(size))]
    return max((saved.number for path in folders for saved in saved_in(path)), default=0)


def part_of(session: SessionParts, contents: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return the contents that one process saves: only the first saves models and optimizers that are equal in all."""
    contents = {**contents, "sharded": session.processes.sharded}
    if rank == 0 or session.processes.sharded:
        return contents
    trained = [dict(bare(model).named_parameters(remove_duplicate=False)) for model in session.models]
    models = [
        {name: value for name, value in saved.items() if name not in named}
        for saved, named in zip(contents["session"]["models"], trained, strict=True)
    ]
    return {**contents, "session": {"models": models}}  # the buffers: running means may differ between processes


def contents_for_rank(snapshot: CompleteSnapshot, rank: int, size: int) -> Any:
    """Return the contents for one of ``size`` processes; the same or another number of processes saved the snapshot.

    Raises:
        SnapshotError: a file is not whole, or it was saved inside a window by another number of processes.
    """
    if len(snapshot.paths) == size:
        own = contents_at(snapshot.paths[rank])
        if rank == 0 or own.get("sharded") is not False:
            return own
        session = contents_at(snapshot.paths[0])["session"]
        models = [
            {**saved, **buffers} for saved, buffers in zip(session["models"], own["session"]["models"], strict=True)
        ]
        return {**own, "session": {**session, "models": models}}
    first = contents_at(snapshot.paths[0])
    if first["window"] is not None:
        raise SnapshotError(
            f"it was saved by {len(snapshot.paths)} processes inside an accumulation window, and there are {size}",
            hint="start as many processes, or load one that was saved after an update",
        )
    if first.get("sharded"):
        others = [contents_at(path) for path in snapshot.paths[1:]]
        first = {**first, "session": whole([first["session"], *(other["session"] for other in others)])}
    position = {"epoch": first["position"]["epoch"], "batch": 0, "began": None, "generators": []}
    return {**first, "position": position, "random": random_states()}


def _sizes(folder: Path) -> Iterator[int]:
    if folder.is_dir():
        yield from sorted({int(found[2]) for place in folder.iterdir() if (found := _RANK.fullmatch(place.name))})
