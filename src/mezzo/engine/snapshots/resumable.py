"""A session's own snapshots, in one process or several: state dicts, files, the position in the data.

``rank-0-of-2/000007-update-00001200.safetensors``. A snapshot is whole if every process has it. Only the first process saves tensors
that are equal in all processes; each saves its own shards, random generators and position in the data.
"""

from __future__ import annotations

import functools
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mezzo.engine.processes.shards import bare
from mezzo.engine.randomness import random_states
from mezzo.engine.snapshots.background import Saving
from mezzo.engine.snapshots.contents import contents_of, load_or_refuse, set_contents, state_of
from mezzo.engine.snapshots.folder import RefusedSnapshot, contents_at, load_first, saved_in
from mezzo.engine.snapshots.structure import take_apart, whole
from mezzo.engine.state import SessionParts
from mezzo.errors import SnapshotError


class Loaded(NamedTuple):
    """The snapshot that was loaded."""

    path: Path
    updates: int
    """Updates made before it was saved."""
    extra: Any
    """The ``extra`` that was passed to ``save``."""
    refused: list[RefusedSnapshot]
    """Newer ones in the folder, each with the reason why it was not loaded."""


class Resumable(SessionParts):
    """The saving and loading of a session."""

    def state_dict(self) -> dict[str, Any]:
        """Return models (in FP32), optimizers, schedulers, scales and counts, to load under any policy.

        Raises:
            SessionError: a window is open; its gradients are not part of the state.
        """
        self.state.schedules.settle()
        return state_of(self, window_calls=self.state.window.calls)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` returned, under this policy or another.

        Raises:
            SessionError: the state has other numbers of models, optimizers, schedulers or losses, or does not fit; nothing changed.
            SnapshotError: it is of another model; nothing changed.
        """
        load_or_refuse(self, state, window_calls=self.state.window.calls)

    @property
    def epoch(self) -> int:
        """The number of passes over ``batches`` that are finished."""
        return self.state.position.epoch

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a pass over ``loader``; after ``load`` only the open pass's batches that were not trained on yet.

        Raises:
            SessionError: ``loader`` is an iterator, or not the loader of the run that was stopped.
        """
        return self.state.position.batches(loader)

    def save(
        self,
        folder: Path | str,
        *,
        every_s: float | None = None,
        keep: int = 3,
        extra: Any = None,
    ) -> Saving | None:
        """Write a snapshot in the background; call it after ``step``: the last batch counts as trained on.

        Args:
            folder: the folder of the snapshots; created if it is missing, and locked until this process ends.
            every_s: save only if this many seconds have passed since the last save, and that one is written. After SIGTERM the next call
                saves and ends the process with exit code 143.
            keep: how many snapshots to keep; older ones are deleted once the new one is whole.
            extra: numbers, texts and tensors of your own, which ``load`` returns.

        Returns:
            The save, whose ``wait()`` returns when it is on the disk; None if none was due.

        Raises:
            SnapshotError: the last save failed, the folder cannot be used, or the state contains a value that cannot be saved.
        """
        root, snapshots = Path(folder), self.state.snapshots
        agreement = snapshots.agreement(self.processes)
        if not snapshots.due(every_s, agreement):
            return None
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise SnapshotError(
                f"keep={keep!r}; allowed: a whole number of 1 or more", hint="leave keep out for the default, 3"
            )
        rank, size = (0, 1) if agreement is None else (agreement.rank, agreement.size)
        self.state.schedules.settle()
        number, error = 0, None
        try:
            target = snapshots.begin(folder_of(root, rank, size))
            number = last_number(root)
            contents = contents_of(self, extra)
            tree, tensors = take_apart(contents if agreement is None else part_of(self, contents, rank))
        except SnapshotError as failed:
            error = failed
        if agreement is not None:
            number, fails = agreement.largest([number, error is not None])
            if fails and error is None:
                why = "another process could not save its part; the snapshots before it are untouched"
                error = SnapshotError(why, hint="its own message names the reason")
        if error is not None:
            raise error
        target.begin_after(number)
        path = target.next_path(updates=self.state.progress.updates_closed, calls=self.state.window.calls)
        # A process that is killed while it saves has only the snapshot before: so the others keep that one, too.
        saving = Saving(path, tree, snapshots.copies.of(tensors), lambda: target.prune(keep + (size > 1)))
        snapshots.begin_saving(saving)
        if snapshots.notice.received and every_s is not None:
            saving.wait()
            raise SystemExit(128 + signal.SIGTERM)
        return saving

    def load(self, path: Path | str, *, must_exist: bool = True) -> Loaded | None:
        """Continue from a snapshot: bit for bit like the run that saved it, if this session and its data are built alike.

        Args:
            path: a snapshot, or a folder, whose newest whole snapshot is loaded; a warning names those that were refused.
            must_exist: whether a folder without any snapshot is an error; otherwise None is returned.

        Raises:
            SnapshotError: there is none, or none can be loaded; the session is unchanged.
        """
        path = Path(path)
        agreement = self.state.snapshots.agreement(self.processes)
        snapshots = complete_snapshots(path) if agreement is None or agreement.rank == 0 else None
        if agreement is not None:
            _, snapshots = agreement.first_of(snapshots) or (0, [])
        in_all = (lambda here: here) if agreement is None else agreement.in_all
        rank, size = (0, 1) if agreement is None else (agreement.rank, agreement.size)
        candidates = [
            (snapshot.paths[min(rank, len(snapshot.paths) - 1)], functools.partial(_read, snapshot, rank, size, in_all))
            for snapshot in snapshots or []
        ]
        chosen = load_first(candidates, lambda contents: set_contents(self, contents, in_all=in_all), folder=path)
        if chosen is not None:
            contents = chosen.contents
            return Loaded(chosen.path, contents["session"]["updates"], contents["extra"], chosen.refused)
        if not must_exist:
            return None
        raise SnapshotError(
            f"there is no snapshot at {str(path)!r}",
            hint="pass the folder that session.save wrote to; to start from scratch if there is none: load(folder, must_exist=False)",
        )


def _read(snapshot: CompleteSnapshot, rank: int, size: int, in_all: Callable[[bool], bool]) -> Any:
    """Return the contents of a snapshot if all processes can read theirs."""
    error = None
    try:
        contents = contents_for_rank(snapshot, rank, size)
    except SnapshotError as failed:
        error = failed
    if in_all(error is None):
        return contents
    raise error or SnapshotError("another process cannot read its part", hint="its own message names the reason")


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
            hint="start as many processes, or load a snapshot that was saved after an update",
        )
    if first.get("sharded"):
        others = [contents_at(path) for path in snapshot.paths[1:]]
        first = {**first, "session": whole([first["session"], *(other["session"] for other in others)])}
    position = {"epoch": first["position"]["epoch"], "batch": 0, "began": None, "generators": []}
    return {**first, "position": position, "random": random_states()}


def _sizes(folder: Path) -> Iterator[int]:
    if folder.is_dir():
        yield from sorted({int(found[2]) for place in folder.iterdir() if (found := _RANK.fullmatch(place.name))})
