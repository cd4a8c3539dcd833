"""Warnings at the script's line: torch warns about its caller, and under Mezzo's hooks that is a line of Mezzo.

Limit: a script that replaces ``warnings.showwarning``, or records warnings, sees Mezzo's line.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, TextIO

from mezzo.observe.source_lines import is_of_mezzo, script_line


def at_script_line(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``warnings.showwarning`` that shows with ``own``, once for each text and line, what a line of Mezzo seems to cause."""
    shown: set[tuple[str, str]] = set()
    repeated: set[tuple[str, str]] = set()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        place = script_line(_cause())[0] if is_of_mezzo(filename) else ""
        told = str(message), place or f"{filename}:{lineno}"
        if told in shown and (place or told not in repeated):
            if not place:  # Python has not seen it at the script's line before
                repeated.add(told)
        else:
            shown.add(told)
            path, _, number = told[1].rpartition(":")
            own(message, category, path, int(number), file, None if place else line)
        if place:
            _forget(filename)  # torch may warn again about another line of the script

    return show


def _cause() -> FrameType | None:
    """Return the frame that caused the warning that is shown."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(2)))
    return next((frame for frame in frames if frame.f_code.co_filename != warnings.__file__), None)


def _forget(filename: str) -> None:
    """Forget that a file has warned, which Python does once for each text and line."""
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == filename:
            vars(module).pop("__warningregistry__", None)
