"""Find the line of the script that is running."""

from __future__ import annotations

from pathlib import Path
from types import FrameType

import torch

_TORCH = str(Path(torch.__file__).parent)
_MEZZO = str(Path(__file__).parents[1])
_FOREIGN: dict[str, bool] = {}


def script_line(frame: FrameType | None) -> tuple[str, tuple[str, ...]]:
    """Return the innermost line outside torch and Mezzo as ``file:line``, and torch's Python functions that it called."""
    callers: list[str] = []
    while frame is not None:
        name = frame.f_code.co_filename
        foreign = _FOREIGN.get(name)
        if foreign is None:
            foreign = _FOREIGN[name] = name.startswith((_TORCH, _MEZZO, "<frozen"))
        if not foreign:
            return f"{name}:{frame.f_lineno}", tuple(callers)
        callers.append(frame.f_code.co_name)
        frame = frame.f_back
    return "", tuple(callers)
