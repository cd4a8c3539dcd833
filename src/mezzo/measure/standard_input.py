"""Standard input of a script that a command runs several times: each run reads it from the start."""

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
"""Time without input after which a message says what the command waits for."""
_FILE = f"/proc/self/fd/{_INPUT}"
"""A file that is opened again by this path has a position of its own."""


def keep_input(sources: Iterable[str], *, say: Callable[[str], object]) -> None:
    """Replace a pipe on standard input by a file with its content, if one of ``sources``, the texts of a script's files, reads it.

    Otherwise the first run would leave nothing for the others. A pipe that the script does not read is left alone: it may never end.
    ``say`` prints a message if the input takes long to arrive.
    """
    if not (_is_pipe() and any(map(_reads_input, sources))):
        return
    if not select.select([_INPUT], [], [], _PATIENCE_S)[0]:
        say("waiting for the end of standard input, which the script reads; if it needs none, add < /dev/null")
    with tempfile.TemporaryFile() as copy:
        with os.fdopen(os.dup(_INPUT), "rb") as pipe:
            shutil.copyfileobj(pipe, copy)
        copy.seek(0)
        os.dup2(copy.fileno(), _INPUT)


def reopen_input() -> None:
    """Give this process its own position in the file on standard input, so that what it reads is not lost to processes that share it."""
    if not _is_file() or not os.path.exists(_FILE):
        return
    position = os.lseek(_INPUT, 0, os.SEEK_CUR)
    with contextlib.suppress(OSError):  # the file may not be opened again
        reopened = os.open(_FILE, os.O_RDONLY)
        os.lseek(reopened, position, os.SEEK_SET)
        os.dup2(reopened, _INPUT)
        os.close(reopened)


def digest_of_input(sources: Iterable[str]) -> str:
    """Return a digest of the file on standard input; empty if there is none, or none of ``sources`` reads it."""
    if not (_is_file() and any(map(_reads_input, sources))):
        return ""
    position, digest = os.lseek(_INPUT, 0, os.SEEK_CUR), hashlib.sha256()
    while part := os.pread(_INPUT, 1 << 20, position):
        digest.update(part)
        position += len(part)
    return digest.hexdigest()


def _reads_input(source: str) -> bool:
    """Return whether Python source reads standard input; a method called ``input``, such as a layer's, is something else."""
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
