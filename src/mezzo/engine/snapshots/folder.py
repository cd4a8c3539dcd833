"""A folder of snapshots: what it holds, which of them to load, which run may write to it.

Files are numbered in the order in which they were written (``000007-update-00001200.safetensors``), not by their updates: after a return
to an older snapshot, a newer file may have fewer updates.

The lock is the operating system's (``lockf``). It ends with its process, however that ends, so stale locks cannot remain; child
processes, such as data loader workers, do not inherit it.
"""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary, finalize

from mezzo.engine.snapshots import container
from mezzo.engine.snapshots.structure import put_together
from mezzo.errors import SnapshotError
from mezzo.secrets import hidden

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = "lock.json"
_NAME = re.compile(r"(\d{6,})-update-(\d{8,})(?:\+(\d+))?\.safetensors")
_PART = re.compile(rf"\.{_NAME.pattern}\.\d+\.part")


class SavedSnapshot(NamedTuple):
    """A snapshot by its name."""

    number: int
    """Its position in the order of writing, from 1."""
    updates: int
    """Updates before it, skipped ones included."""
    calls: int
    """Backward passes of the window that was open."""
    path: Path


def saved_in(folder: Path) -> list[SavedSnapshot]:
    """Return the snapshots in ``folder``, the newest first; none if there is no such folder.

    Raises:
        SnapshotError: the folder cannot be read.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unusable(folder, error) from None
    found = [(name, _NAME.fullmatch(name)) for name in names]
    named = [
        SavedSnapshot(int(match[1]), int(match[2]), int(match[3] or 0), folder / name)
        for name, match in found
        if match is not None
    ]
    return sorted(named, reverse=True)


class Folder:
    """A folder that one run writes snapshots to."""

    def __init__(self, path: Path) -> None:
        """Create the folder, lock it, and remove the remains of interrupted writes.

        Raises:
            SnapshotError: another run is writing to it, or it cannot be written to.
        """
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(path)
            for name in os.listdir(path):
                if _PART.fullmatch(name):
                    (path / name).unlink(missing_ok=True)
        except OSError as error:
            raise _unusable(path, error) from None
        self._last = max((saved.number for saved in saved_in(path)), default=0)

    def begin_after(self, number: int) -> None:
        """Number the next snapshot above ``number``, like other processes."""
        self._last = max(self._last, number)

    def next_path(self, *, updates: int, calls: int) -> Path:
        """Return the path of the next snapshot, after ``calls`` backward passes of an open window.

        Raises:
            SnapshotError: the folder was removed or replaced since it was locked.
        """
        try:
            same = os.path.samestat((self.path / LOCK).stat(), os.fstat(self._lock.descriptor))
        except OSError:
            same = False
        if not same:
            raise SnapshotError(
                f"the folder {str(self.path)!r} was removed or replaced while this run was writing snapshots to it",
                hint="check whether its disk is still mounted, and save to a folder that stays",
            )
        self._last += 1
        window = f"+{calls}" if calls else ""
        return self.path / f"{self._last:06d}-update-{updates:08d}{window}.safetensors"

    def prune(self, keep: int) -> None:
        """Delete all but the newest ``keep`` snapshots."""
        for saved in saved_in(self.path)[keep:]:
            saved.path.unlink(missing_ok=True)

    def release(self) -> None:
        """Let another run write to the folder."""
        self._lock.release()


class _Lock:
    """A locked file, opened only once: closing any other handle of it in this process would end the lock."""

    def __init__(self, key: tuple[int, int], descriptor: int) -> None:
        self.key, self.descriptor = key, descriptor
        self.release = finalize(self, os.close, descriptor)
        """Unlocks; so does the end of the object or of the process."""


_LOCKED: WeakValueDictionary[tuple[int, int], _Lock] = WeakValueDictionary()
"""The folders that this process has locked, by device and inode."""


def _locked(path: Path) -> _Lock:
    status = path.stat()
    key = (status.st_dev, status.st_ino)
    existing = _LOCKED.get(key)
    if existing is not None and existing.release.alive:
        raise _taken(path, "another session of this process")
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if fcntl is not None:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = _owner(os.read(descriptor, 4096))
        os.close(descriptor)
        raise _taken(path, owner) from None
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "command": " ".join(hidden(sys.argv))[:1000]})
    os.ftruncate(descriptor, 0)
    os.write(descriptor, text.encode())
    lock = _LOCKED[key] = _Lock(key, descriptor)
    return lock


def _owner(text: bytes) -> str:
    try:
        owner = json.loads(text)
        return f"process {owner['pid']} on {owner['host']} ({owner['command']})"
    except (ValueError, KeyError, TypeError):
        return "another process"


def _taken(path: Path, owner: str) -> SnapshotError:
    return SnapshotError(
        f"{owner} is writing snapshots to {str(path)!r}; allowed: one run per folder",
        hint="stop that run, or save to another folder",
    )


def _unusable(path: Path, error: OSError) -> SnapshotError:
    return SnapshotError(
        f"cannot use {str(path)!r} for snapshots: {error.strerror}",
        hint="choose a folder that exists or can be created, and that you may write to",
    )


class RefusedSnapshot(NamedTuple):
    """A snapshot that was not loaded."""

    path: Path
    why: str


class LoadedSnapshot(NamedTuple):
    """The snapshot that was loaded."""

    path: Path
    contents: Any
    refused: list[RefusedSnapshot]
    """Newer snapshots in the folder."""


def load_newest(path: Path, load: Callable[[Any], None]) -> LoadedSnapshot | None:
    """Load a snapshot, or the newest loadable one in a folder, like ``load_first``."""
    files = [path] if path.is_file() else [saved.path for saved in saved_in(path)]
    return load_first([(file, functools.partial(contents_at, file)) for file in files], load, folder=path)


def load_first(
    candidates: Sequence[tuple[Path, Callable[[], Any]]], load: Callable[[Any], None], *, folder: Path
) -> LoadedSnapshot | None:
    """Load the first loadable of several snapshots; a warning names those before it. None if there are no candidates.

    Args:
        candidates: the newest first, each with a function that returns its contents or raises ``SnapshotError``.
        load: loads the contents, or raises ``SnapshotError`` and changes nothing.
        folder: their folder, for messages.

    Raises:
        SnapshotError: none of them can be loaded.
    """
    refused: list[RefusedSnapshot] = []
    for path, read in candidates:
        try:
            contents = read()
            load(contents)
        except SnapshotError as error:
            if len(candidates) == 1:
                raise
            refused.append(RefusedSnapshot(path, error.message))
            continue
        if refused:
            listed = "; ".join(f"{snapshot.path.name}: {snapshot.why}" for snapshot in refused)
            warnings.warn(f"loaded {path.name}; not loaded, though newer: {listed}", UserWarning, stacklevel=3)
        return LoadedSnapshot(path, contents, refused)
    if not candidates:
        return None
    raise none_loaded(refused, f"in {str(folder)!r}")


def none_loaded(refused: Sequence[RefusedSnapshot], which: str) -> SnapshotError:
    """Return the error that none of the snapshots can be loaded, with the reason for each."""
    listed = "".join(f"\n  {snapshot.path.name}: {snapshot.why}" for snapshot in refused)
    return SnapshotError(
        f"none of the {len(refused)} snapshots {which} can be loaded:{listed}",
        hint="start over in another folder; these files were left as they are",
    )


def contents_at(path: Path) -> Any:
    """Return the contents of the snapshot at ``path``.

    Raises:
        SnapshotError: the file is not whole, or contains no state.
    """
    tree, tensors, _ = container.read(path)
    try:
        return put_together(tree, tensors)
    except Exception as error:  # a file with a correct checksum may still contain anything
        raise SnapshotError(
            f"{str(path)!r} contains no state: {type(error).__name__}: {str(error)[:200]}",
            hint="pass a snapshot that Mezzo wrote",
        ) from None


def snapshots_below(folder: Path) -> list[SavedSnapshot]:
    """Return the snapshots in ``folder`` and in its folders of a run's processes; the newest first."""
    folders = [folder, *sorted(folder.glob("rank-*-of-*"))]
    return sorted((saved for each in folders for saved in saved_in(each)), key=lambda saved: -saved.number)


def listing(folder: Path) -> Iterator[str]:
    """Yield the lines of a sheet of the snapshots in ``folder``; every byte of the newest is checked."""
    saved = snapshots_below(folder)
    yield f"{len(saved)} snapshots in {folder}"
    for snapshot in saved:
        calls = f", {snapshot.calls} micro-batches of the next" if snapshot.calls else ""
        size = snapshot.path.stat().st_size
        yield f"  {snapshot.path.relative_to(folder)}   {size:,} bytes   after {snapshot.updates} updates{calls}"
    try:
        contents = container.read(saved[0].path)
    except SnapshotError as error:
        yield f"the newest cannot be read: {error.message}"
        return
    file = f"file version {container.FILE_VERSION}, {contents.written_by}"
    yield f"in {saved[0].path.relative_to(folder)}: {_position(contents.tree)}; {file}"
    width = max(map(len, map(_shown, contents.tensors)), default=0)
    for name, tensor in contents.tensors.items():
        shape = "x".join(map(str, tensor.shape)) or "one number"
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield f"  {_shown(name):{width}}   {dtype}   {shape}   {tensor.nbytes:,} bytes"


def _position(tree: Any) -> str:
    position = tree.get("position") if isinstance(tree, dict) else None
    counts = [position.get(name) for name in ("epoch", "batch")] if isinstance(position, dict) else []
    if not counts or not all(type(count) is int for count in counts):
        return "no position in the data"
    return f"{counts[0]} finished passes over the data and {counts[1]} batches"


def _shown(name: str) -> str:
    """Return a name without characters that a terminal would obey."""
    return name.encode("unicode_escape").decode()
