"""Which objects of a forked run Python has to finalise when the run ends.

The objects of torch and Mezzo exist before the fork and are frozen (``gc.freeze``): to collect them again took most of the time in which
a run ended. What they refer to is then not collected either. That matters only for objects that do something at their end: if the run
has left such an object, everything is collected, as in a process of its own.
"""

from __future__ import annotations

import gc
import io
from collections.abc import Iterator
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any


def ids_to_finalise() -> frozenset[int]:
    """Return the ids of the collected objects that do something at their end: before the fork, those of libraries."""
    return frozenset(map(id, _to_finalise()))


def collect_all_if_needed(before: frozenset[int]) -> None:
    """Let Python collect the frozen objects, too, if there are objects to finalise other than ``before``."""
    if any(id(one) not in before for one in _to_finalise()):
        gc.unfreeze()


def _to_finalise() -> Iterator[Any]:
    """Yield open files, suspended generators, and objects with a ``__del__``."""
    for one in gc.get_objects():
        kind = type(one)
        if issubclass(kind, io.IOBase):
            if not one.closed:
                yield one
        elif issubclass(kind, GeneratorType):
            if one.gi_frame is not None:
                yield one
        elif issubclass(kind, (CoroutineType, AsyncGeneratorType)) or hasattr(kind, "__del__"):
            yield one
