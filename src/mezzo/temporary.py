"""Folders for temporary files: they end with their process or, if it was killed, when another process makes such a folder."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NAME = re.compile(r"mezzo-of-(?P<namespace>\d+)-(?P<pid>\d+)-(?P<began>\d*)-\w+")


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a new folder, which is removed at the end."""
    folder = _new_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def folder_of_process() -> Path:
    """Return a new folder, which is removed when this process ends."""
    folder, pid = _new_folder(), os.getpid()

    def remove() -> None:
        if os.getpid() == pid:  # a process that it forks ends before
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def began(pid: int) -> str:
    """Return when a process began, in the system's ticks; empty if it has ended, even if its parent has not noticed, or without Linux."""
    try:
        state, *fields = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
    except (OSError, ValueError):
        return ""
    return "" if state in ("Z", "X") else fields[18]


def namespace() -> str:
    """Return what tells containers apart, each of which has process numbers of its own; empty without Linux."""
    try:
        return "".join(filter(str.isdigit, os.readlink("/proc/self/ns/pid")))
    except OSError:
        return ""


def _new_folder() -> Path:
    """Create a folder with the name of this process, after removing folders of processes that have ended."""
    for folder in Path(tempfile.gettempdir()).glob("mezzo-of-*"):
        found = _NAME.fullmatch(folder.name)
        if found is None or found["namespace"] != namespace() or found["began"] == began(int(found["pid"])):
            continue
        with suppress(OSError):  # another process may just do the same
            if folder.stat().st_uid == os.getuid():
                shutil.rmtree(folder)
    pid = os.getpid()
    return Path(tempfile.mkdtemp(prefix=f"mezzo-of-{namespace() or 0}-{pid}-{began(pid)}-"))
