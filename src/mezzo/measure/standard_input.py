"""What a script reads from standard input, when a command runs the script several times: each run reads it from its start."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import select
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable

_INPUT = 0
_PATIENCE_S = 2.0
"""Time without input after which the user is told what is waited for."""
_FILE = f"/proc/self/fd/{_INPUT}"
"""Opened anew, a file has a position of its own."""


def keep_input(sources: Iterable[str], *, say: Callable[[str], object]) -> None:
    """Put a file in place of the pipe that this process reads, if one of ``sources``, texts of a script's files, reads it.

    Without that, the first run would leave nothing to the others. What no script reads is left alone: it may never end.
    ``say`` prints a line if the input takes long to come.
    """
    if not (_is_pipe() and any(map(_reads_input, sources))):
        return
    if not select.select([_INPUT], [], [], _PATIENCE_S)[0]:
        say("waiting for the end of standard input, which the script reads; if it needs none, add < /dev/null")
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


def digest_of_input(sources: Iterable[str]) -> str:
    """Return a digest of the file that this process reads; empty where it reads none, or none of ``sources`` reads it."""
    if not (_is_file() and any(map(_reads_input, sources))):
        return ""
    position, text = os.lseek(_INPUT, 0, os.SEEK_CUR), hashlib.sha256()
    while part := os.pread(_INPUT, 1 << 20, position):
        text.update(part)
        position += len(part)
    return text.hexdigest()


def _reads_input(source: str) -> bool:
    """Return whether a text of Python names standard input; a method called ``input``, as of a layer, is something else."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return False
    calls = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    imported = {alias.name for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names}
    return "input" in calls or "stdin" in names | imported or "fileinput" in imported


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
