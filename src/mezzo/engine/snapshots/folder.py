"""A folder of snapshots: their names, the newest ones, and the one run that may write to it.

Files are numbered in the order in which they were written (``000007-update-00001200.safetensors``), not by their updates: after a return
to an older snapshot, a newer file may have fewer updates.

The lock is the operating system's (``lockf``). It ends with its process, however that ends, so stale locks cannot remain; child
processes, such as data loader workers, do not inherit it.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary, finalize

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
