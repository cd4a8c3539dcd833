"""The methods of a session that save and restore it: state dicts, snapshots, the position in the data."""

from __future__ import annotations

import functools
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mezzo.engine.processes.agreement import Agreement
from mezzo.engine.snapshots.background import Copies, Saving
from mezzo.engine.snapshots.choosing import RefusedSnapshot, load_first
from mezzo.engine.snapshots.contents import contents_of, set_contents
from mezzo.engine.snapshots.folder import Folder
from mezzo.engine.snapshots.of_ranks import OfAll, folder_of, last_number, part_of, read_together, whole_ones
from mezzo.engine.snapshots.position import Position
from mezzo.engine.snapshots.structure import take_apart
from mezzo.engine.state import load_state, state_of
from mezzo.errors import SnapshotError

if TYPE_CHECKING:
    from mezzo.engine.session import Session


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
        self._together: Agreement | None = None
        self._calls = 0

    def together(self, session: Session) -> Agreement | None:
        """Return the agreement with the other processes that train the same model; None if there are none."""
        if self._together is None and session.processes.several:
            self._together = Agreement(within=session.processes.group)
        return self._together

    def due(self, every_s: float | None, together: Agreement | None) -> bool:
        """Return whether ``every_s`` seconds have passed since the last save, or a process was asked to end; all return the same."""
        self._calls += 1
        if every_s is None:
            return True
        self.notice.listen()
        due = self.notice.given or time.monotonic() - self.last_s >= every_s
        if together is None:
            return due
        if self._calls < together.next:
            return False
        due, self.notice.given = map(bool, together.exchange(self._calls, [due, self.notice.given]))
        return due

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
        self.given = False
        self._listens = False

    def listen(self) -> None:
        """Handle SIGTERM from now on, unless the script has its own handler."""
        if self._listens or threading.current_thread() is not threading.main_thread():
            return
        self._listens = True
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self.given = True


class Resumable:
    """The saving and loading of a session."""

    _position: Position
    _snapshots: Snapshots

    def state_dict(self: Session) -> dict[str, Any]:  # type: ignore[misc]
        """Return models (in FP32), optimizers, schedulers, scales and counts, to load under any policy.

        Raises:
            SessionError: a window is open; its gradients are not part of the state.
        """
        self._schedules.settle()
        return state_of(self, window_calls=self._window.calls)

    def load_state_dict(self: Session, state: dict[str, Any]) -> None:  # type: ignore[misc]
        """Load a state that ``state_dict`` returned, under this policy or another.

        Raises:
            SessionError: the state has other numbers of models, optimizers, schedulers or losses.
        """
        load_state(self, state, window_calls=self._window.calls)
        self._progress.windows = state["updates"] + state["skipped"]
        self._progress.skips.fill_(state["skipped"])

    @property
    def epoch(self) -> int:
        """The number of passes over ``batches`` that are finished."""
        return self._position.epoch

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a pass over ``loader``; after ``load`` those of the open pass that were not trained on yet.

        Raises:
            SessionError: ``loader`` is an iterator, or not the loader of the run that was stopped.
        """
        return self._position.batches(loader)

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
            every_s: save only if this many seconds have passed since the last save. After SIGTERM the next call saves and ends the process
                with exit code 143.
            keep: how many snapshots to keep; older ones are deleted once the new one is whole.
            extra: numbers, texts and tensors of your own, which ``load`` returns.

        Returns:
            The save, whose ``wait()`` returns when it is on the disk; None if none was due.

        Raises:
            SnapshotError: the last save failed, the folder cannot be used, or the state contains a value that cannot be saved.
        """
        root, own = Path(folder), self._snapshots
        together = own.together(self)
        if not own.due(every_s, together):
            return None
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise SnapshotError(f"keep={keep!r}; allowed: a whole number of 1 or more", hint="leave keep out for 3")
        rank, size = (0, 1) if together is None else (together.rank, together.size)
        self._schedules.settle()
        number, error = 0, None
        try:
            into = own.begin(folder_of(root, rank, size))
            number = last_number(root)
            contents = contents_of(self, extra)
            tree, tensors = take_apart(contents if together is None else part_of(self, contents, rank))
        except SnapshotError as failed:
            error = failed
        if together is not None:
            number, fails = together.largest([number, error is not None])
            if fails and error is None:
                why = "another process could not save its part; the snapshots before it are untouched"
                error = SnapshotError(why, hint="its own message names the reason")
        if error is not None:
            raise error
        into.begin_after(number)
        path = into.next_path(updates=self._progress.windows, calls=self._window.calls)
        # A process that is killed while it saves has only the snapshot before: so the others keep that one, too.
        own.saving = Saving(path, tree, own.copies.of(tensors), lambda: into.prune(keep + (size > 1)))
        own.last_s = time.monotonic()
        if own.notice.given and every_s is not None:
            own.saving.wait()
            raise SystemExit(128 + signal.SIGTERM)
        return own.saving

    def load(self: Session, path: Path | str, *, must_exist: bool = True) -> Loaded | None:  # type: ignore[misc]
        """Continue from a snapshot: bit for bit like the run that saved it, if this session and its data are built alike.

        Args:
            path: a snapshot, or a folder, whose newest whole snapshot is loaded; a warning names those that were refused.
            must_exist: whether a folder without any snapshot is an error; otherwise None is returned.

        Raises:
            SnapshotError: there is none, or none can be loaded; the session is unchanged.
        """
        path = Path(path)
        together = self._snapshots.together(self)
        found = whole_ones(path) if together is None or together.rank == 0 else None
        if together is not None:
            _, found = together.first_of(found) or (0, [])
        in_all = (lambda here: here) if together is None else together.in_all
        rank, size = (0, 1) if together is None else (together.rank, together.size)
        candidates = [
            (one.paths[min(rank, len(one.paths) - 1)], functools.partial(_read, one, rank, size, in_all))
            for one in found or []
        ]
        chosen = load_first(candidates, lambda contents: set_contents(self, contents, in_all=in_all), folder=path)
        if chosen is not None:
            contents = chosen.contents
            return Loaded(chosen.path, contents["session"]["updates"], contents["extra"], chosen.refused)
        if not must_exist:
            return None
        raise SnapshotError(
            f"there is no snapshot at {str(path)!r}",
            hint="pass the folder that session.save wrote to; to begin anew where there is none: load(folder, must_exist=False)",
        )


def _read(one: OfAll, rank: int, size: int, in_all: Callable[[bool], bool]) -> Any:
    """Return the contents of a snapshot if all processes can read theirs."""
    error = None
    try:
        contents = read_together(one, rank, size)
    except SnapshotError as failed:
        error = failed
    if in_all(error is None):
        return contents
    raise error or SnapshotError("another process cannot read its part", hint="its own message names the reason")
