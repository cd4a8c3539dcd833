"""Print an error of the user's script as Python would have: without the launcher's frames."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType

_OURS = str(Path(__file__).resolve().parent.parent) + os.sep
_STARTERS = ("<frozen runpy>", "runpy.py")


def print_error(error: BaseException) -> None:
    """Print ``error`` with ``sys.excepthook``, which the script may have replaced."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        found = waiting.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            found.__traceback__ = without_ours(found.__traceback__)
            waiting += [found.__cause__, found.__context__]
    sys.excepthook(type(error), error, error.__traceback__)


def without_ours(traceback: TracebackType | None) -> TracebackType | None:
    """Return ``traceback`` without the frames of this package and of the code that started the script."""
    entries: list[TracebackType] = []
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        starts = not entries and file.endswith(_STARTERS)
        if not starts and not file.startswith(_OURS):
            entries.append(traceback)
        traceback = traceback.tb_next
    rest: TracebackType | None = None
    for entry in reversed(entries):
        rest = TracebackType(rest, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return rest
