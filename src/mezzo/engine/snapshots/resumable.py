"""The methods of a session that save and restore it: state dicts, snapshots, the position in the data."""

from __future__ import annotations

import functools
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mezzo.engine.processes.agreement import Agreement, save_is_due
from mezzo.engine.snapshots.background import Copies, Saving
from mezzo.engine.snapshots.choosing import RefusedSnapshot, load_first
from mezzo.engine.snapshots.contents import contents_of, load_or_refuse, set_contents
from mezzo.engine.snapshots.folder import Folder
from mezzo.engine.snapshots.of_ranks import (
    CompleteSnapshot,
    complete_snapshots,
    contents_for_rank,
    folder_of,
    last_number,
    part_of,
)
from mezzo.engine.snapshots.structure import take_apart
from mezzo.engine.state import state_of
from mezzo.errors import SnapshotError

if TYPE_CHECKING:
    from mezzo.engine.session import Session
    from mezzo.engine.state import SessionState


class Loaded(NamedTuple):
    """The snapshot that was loaded."""

    path: Path
    updates: int
    """Updates made before it was saved."""
    extra: Any
    """The ``extra`` that was passed to ``save``."""
    refused: list[RefusedSnapshot]
    """Newer ones in the folder, each with the reason why it was not loaded."""


class Snapshots:
    """The snapshots that one session writes: its folder, its copy of the state, and the save in progress."""

    def __init__(self) -> None:
        self.folder: Folder | None = None
        self.copies = Copies()
        self.saving: Saving | None = None
        self.last_s = time.monotonic()
        self.notice = _Notice()
        self._agreement: Agreement | None = None
        self._calls = 0

    def agreement(self, session: Session) -> Agreement | None:
        """Return the agreement with the other processes that train the same model; None if there are none."""
        if self._agreement is None and session.processes.several:
            self._agreement = Agreement(within=session.processes.group)
        return self._agreement

    def due(self, every_s: float | None, agreement: Agreement | None) -> bool:
        """Return whether to save: ``every_s`` seconds have passed and the last save is written, or a process was asked to end.

        All processes return the same.
        """
        self._calls += 1
        if every_s is None:
            return True
        self.notice.listen()
        due = time.monotonic() - self.last_s >= every_s
        is_writing = every_s > 0 and self.saving is not None and self.saving.is_running
        asked = self.notice.received
        saves, ends = save_is_due(agreement, self._calls, due=due, is_writing=is_writing, asked=asked)
        self.notice.received |= ends  # it may have come in between
        return saves

    def begin(self, path: Path) -> Folder:
        """Wait for the save in progress, and return the locked folder.

        Raises:
            SnapshotError: that save failed, or the folder cannot be used.
        """
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.wait()
        if self.folder is None or self.folder.path != path:
            if self.folder is not None:
                self.folder.release()
            self.folder = Folder(path)
        return self.folder


class _Notice:
    """SIGTERM, which a cluster's scheduler sends some seconds before it ends a process."""

    def __init__(self) -> None:
        self.received = False
        self._listens = False

    def listen(self) -> None:
        """Handle SIGTERM from now on, unless the script has its own handler."""
        if self._listens or threading.current_thread() is not threading.main_thread():
            return
        self._listens = True
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, number: int, frame: Any) -> None:
        self.received = True


class Resumable:
    """The saving and loading of a session."""

    state: SessionState

    def state_dict(self: Session) -> dict[str, Any]:  # type: ignore[misc]
        """Return models (in FP32), optimizers, schedulers, scales and counts, to load under any policy.

        Raises:
            SessionError: a window is open; its gradients are not part of the state.
        """
        self.state.schedules.settle()
        return state_of(self, window_calls=self.state.window.calls)

    def load_state_dict(self: Session, state: dict[str, Any]) -> None:  # type: ignore[misc]
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
        """Yield the batches of a pass over ``loader``; after ``load`` those of the open pass that were not trained on yet.

        Raises:
            SessionError: ``loader`` is an iterator, or not the loader of the run that was stopped.
        """
        return self.state.position.batches(loader)

    def save(  # type: ignore[misc]
        self: Session,
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
        agreement = snapshots.agreement(self)
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
        path = target.next_path(updates=self.state.progress.windows, calls=self.state.window.calls)
        # A process that is killed while it saves has only the snapshot before: so the others keep that one, too.
        snapshots.saving = Saving(path, tree, snapshots.copies.of(tensors), lambda: target.prune(keep + (size > 1)))
        snapshots.last_s = time.monotonic()
        if snapshots.notice.received and every_s is not None:
            snapshots.saving.wait()
            raise SystemExit(128 + signal.SIGTERM)
        return snapshots.saving

    def load(self: Session, path: Path | str, *, must_exist: bool = True) -> Loaded | None:  # type: ignore[misc]
        """Continue from a snapshot: bit for bit like the run that saved it, if this session and its data are built alike.

        Args:
            path: a snapshot, or a folder, whose newest whole snapshot is loaded; a warning names those that were refused.
            must_exist: whether a folder without any snapshot is an error; otherwise None is returned.

        Raises:
            SnapshotError: there is none, or none can be loaded; the session is unchanged.
        """
        path = Path(path)
        agreement = self.state.snapshots.agreement(self)
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
