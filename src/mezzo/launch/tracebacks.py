"""Print an error of the user's script as Python would have: without the launcher's frames."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType

_OURS = str(Path(__file__).resolve().parent.parent) + os.sep
_RUNPY = ("<frozen runpy>", "runpy.py")


def print_error(error: BaseException) -> None:
    """Print ``error`` with ``sys.excepthook``, which the script may have replaced."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop()
        if current is not None and id(current) not in seen:
            seen.add(id(current))
            current.__traceback__ = without_ours(current.__traceback__)
            waiting += [current.__cause__, current.__context__]
    sys.excepthook(type(error), error, error.__traceback__)


def without_ours(traceback: TracebackType | None) -> TracebackType | None:
    """Return ``traceback`` without the frames of this package and of the code that started the script."""
    entries: list[TracebackType] = []
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        starts_script = not entries and file.endswith(_RUNPY)
        if not starts_script and not file.startswith(_OURS):
            entries.append(traceback)
        traceback = traceback.tb_next
    rest: TracebackType | None = None
    for entry in reversed(entries):
        rest = TracebackType(rest, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return rest
