"""What a script reads from standard input, when a command runs the script several times: each run reads it from its start."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable

_INPUT = 0
_READS = re.compile(r"\bstdin\b|\binput\s*\(|\bfileinput\b")
_FILE = f"/proc/self/fd/{_INPUT}"
"""Opened anew, a file has a position of its own."""


def keep_input(sources: Iterable[str]) -> None:
    """Put a file in place of the pipe that this process reads, if one of ``sources``, texts of a script's files, reads it.

    Without that, the first run would leave nothing to the others. What no script reads is left alone: it may never end.
    """
    if not (_is_pipe() and any(_READS.search(source) for source in sources)):
        return
    with tempfile.TemporaryFile() as kept:
        with os.fdopen(os.dup(_INPUT), "rb") as given:
            shutil.copyfileobj(given, kept)
        kept.seek(0)
        os.dup2(kept.fileno(), _INPUT)


def own_input() -> None:
    """Give this process a position of its own in the file that it reads: what it reads is not lost to others that were given it."""
    if not _is_file() or not os.path.exists(_FILE):
        return
    position = os.lseek(_INPUT, 0, os.SEEK_CUR)
    with contextlib.suppress(OSError):  # a file that may not be opened again
        own = os.open(_FILE, os.O_RDONLY)
        os.lseek(own, position, os.SEEK_SET)
        os.dup2(own, _INPUT)
        os.close(own)


def digest_of_input() -> str:
    """Return a digest of the file that this process reads; empty where it reads none."""
    if not _is_file():
        return ""
    position, text = os.lseek(_INPUT, 0, os.SEEK_CUR), hashlib.sha256()
    while part := os.pread(_INPUT, 1 << 20, position):
        text.update(part)
        position += len(part)
    return text.hexdigest()


def _is_pipe() -> bool:
    try:
        mode = os.fstat(_INPUT).st_mode
    except OSError:  # closed
        return False
    return sys.platform == "linux" and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode))


def _is_file() -> bool:
    try:
        return stat.S_ISREG(os.fstat(_INPUT).st_mode)
    except OSError:
        return False
