"""What a function's training made before the launcher could see it being made: found on the heap.

A notebook's heap holds a million objects: a walk takes 0.1 s, because a type is asked once and not at each of its objects.
``isinstance`` would ask the objects themselves, and proxies of other libraries wake up then. Objects that ``gc.freeze``
took out of the collector's sight are not found.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler


def existing(*kinds: type) -> tuple[list[Any], ...]:
    """Return the objects alive of each of ``kinds`` and its subclasses."""
    objects = gc.get_objects()
    types = {kind for kind in set(map(type, objects)) if issubclass(kind, kinds)}
    found = [held for held in objects if type(held) in types]
    return tuple([held for held in found if issubclass(type(held), kind)] for kind in kinds)


@contextmanager
def amp_off() -> Iterator[None]:
    """Turn mixed precision off that began before: regions that are open, and autocast and GradScaler objects that exist."""
    with ExitStack() as stack:
        for held in itertools.chain(*existing(autocast, GradScaler)):
            stack.callback(setattr, held, "_enabled", held._enabled)
            held._enabled = False
        for device_type in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield
