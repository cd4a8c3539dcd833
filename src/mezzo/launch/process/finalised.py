"""Which objects of a forked run Python has to finalise when the run ends.

The objects of torch, Mezzo and the shared libraries exist before the fork and are frozen (``gc.freeze``): to collect them again took most
of the time in which a run ended. What they refer to is then not collected either. That matters only for objects that do something at their
end: if the run has left such an object, everything is collected, as in a process of its own.
"""

from __future__ import annotations

import gc
import io
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

_ACT = (io.IOBase, GeneratorType, CoroutineType, AsyncGeneratorType)


def ids_to_finalise() -> frozenset[int]:
    """Return the ids of the collected objects that do something at their end: before the fork, those of libraries."""
    # No generator here: it would be one of them.
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, _ACT) or hasattr(kind, "__del__")}
    return frozenset([id(one) for one in objects if type(one) in kinds and _is_open(one)])


def collect_all_if_needed(before: frozenset[int]) -> None:
    """Let Python collect the frozen objects, too, if there are objects to finalise other than ``before``."""
    if not ids_to_finalise() <= before:
        gc.unfreeze()


def _is_open(one: Any) -> bool:
    """Return whether an object still has an end: a file that is open, a generator that has not ended, anything else."""
    if isinstance(one, io.IOBase):
        return not one.closed
    return not isinstance(one, GeneratorType) or one.gi_frame is not None
