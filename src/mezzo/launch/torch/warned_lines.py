"""Show warnings at the script's line: torch warns about its caller, which under Mezzo's hooks is a line of Mezzo.

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


def at_script_line(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``warnings.showwarning`` that calls ``original`` with the script's line in place of Mezzo's, once per text and line."""
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
        key = str(message), place or f"{filename}:{lineno}"
        if key in shown and (place or key not in repeated):
            if not place:  # Python has not seen it at the script's line before
                repeated.add(key)
        else:
            shown.add(key)
            path, _, number = key[1].rpartition(":")
            original(message, category, path, int(number), file, None if place else line)
        if place:
            _forget(filename)  # torch may warn again about another line of the script

    return show


def _cause() -> FrameType | None:
    """Return the frame that caused the warning being shown."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(2)))
    return next((frame for frame in frames if frame.f_code.co_filename != warnings.__file__), None)


def _forget(filename: str) -> None:
    """Forget the warnings of a file: Python shows each only once per text and line."""
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == filename:
            vars(module).pop("__warningregistry__", None)
