"""Find the script's name for the model that an optimizer trains, among the variables in scope where the optimizer is constructed.

It is the name of the smallest model that has all of the optimizer's parameters: ``generator`` for ``Adam(generator.parameters())`` or
``Adam(self.generator.parameters())``.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

_MAX_FRAMES = 4
_USES_COPY = {"locals", "vars", "exec", "eval"}
"""In Python below 3.13 reading ``f_locals`` makes a copy of a frame's variables; a function that calls one of these may use that copy."""


def name_in_scope(parameters: set[int], kind: type, *, libraries: tuple[str, ...]) -> str | None:
    """Return the name of a model with the given parameters in the calling frames; None if there is none.

    Args:
        parameters: the ids of the parameters.
        kind: the class of models.
        libraries: packages whose frames are skipped.
    """
    callers = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
    script = (f for f in callers if str(f.f_globals.get("__name__", "")).partition(".")[0] not in libraries)
    for frame in itertools.islice(script, _MAX_FRAMES):
        sizes = _sizes_of_models(frame, kind, containing=parameters)
        if sizes:
            return min(sizes, key=lambda size: size[0])[1]
    return None


def _sizes_of_models(frame: FrameType, kind: type, *, containing: set[int]) -> list[tuple[int, str]]:
    """Return the number of parameters and the name of each model in a frame that contains the given parameters."""
    copied = sys.version_info < (3, 13) and bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
    if copied and not _USES_COPY.isdisjoint(frame.f_code.co_names):
        return []
    variables = frame.f_locals
    sizes = [
        (len(ids), name)
        for name, model in _models_in_scope(variables, kind)
        if containing <= (ids := set(map(id, model.parameters())))
    ]
    if copied:  # the frame keeps the copy, which would keep alive what the script releases
        variables.clear()
    return sizes


def _models_in_scope(variables: dict[str, Any], kind: type) -> Iterator[tuple[str, Any]]:
    for name, value in list(variables.items()):
        if isinstance(value, kind):
            yield name, value
    owner = variables.get("self")
    if isinstance(owner, kind):
        yield from owner.named_children()  # type: ignore[attr-defined]
    else:
        yield from ((name, v) for name, v in getattr(owner, "__dict__", {}).items() if isinstance(v, kind))
