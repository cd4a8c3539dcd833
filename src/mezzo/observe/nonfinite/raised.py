"""Where an error that ended a script was raised, by its traceback: also where no operation runs, as in torch's checks of arguments."""

from __future__ import annotations

import traceback
from types import FrameType
from typing import NamedTuple

from torch import nn

from mezzo.observe.source_lines import is_of_mezzo, own_line

_CALLS = ("_wrapped_call_impl", "_call_impl", "forward", "__call__", "inner")
"""Functions of torch through which a module is called."""
_BACKWARD = "_engine_run_backward"


class RaisedAt(NamedTuple):
    """The place at which an error was raised."""

    op: str
    """The function of torch that the script, or its module, called; the script's own function without one."""
    module: nn.Module | None
    """The innermost module that was running."""
    line: str
    backward: bool


def raised_at(error: BaseException) -> RaisedAt | None:
    """Return where an error was raised; None if that was in no file of the script."""
    rows = [(frame, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    owned = [own_line(frame)[0].rpartition(":")[0] == frame.f_code.co_filename for frame, _ in rows]
    if not any(owned):
        return None
    last = len(owned) - 1 - owned[::-1].index(True)
    frame, number = rows[last]
    below = [inner.f_code for inner, _ in rows[last + 1 :] if not is_of_mezzo(inner.f_code.co_filename)]
    called = [code.co_name for code in below if code.co_name not in _CALLS]
    return RaisedAt(
        op=called[0] if called else frame.f_code.co_name,
        module=next((module for one, _ in reversed(rows) if (module := _module_of(one)) is not None), None),
        line=f"{frame.f_code.co_filename}:{number}",
        backward=_BACKWARD in called,
    )


def _module_of(frame: FrameType) -> nn.Module | None:
    value = frame.f_locals.get("self")
    return value if isinstance(value, nn.Module) else None
