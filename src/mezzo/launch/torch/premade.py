"""Find objects on the heap that a function's training made before the launcher's hooks were set.

A notebook's heap has a million objects: a walk takes 0.1 s, because each type is checked once and not for each of its objects.
``isinstance`` would query the objects themselves, which triggers the proxies of other libraries. Objects hidden from the
collector by ``gc.freeze`` are not found.
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


def find_premade(*kinds: type) -> tuple[list[Any], ...]:
    """Return the live objects of each of ``kinds`` and its subclasses."""
    objects = gc.get_objects()
    types = {kind for kind in set(map(type, objects)) if issubclass(kind, kinds)}
    found = [held for held in objects if type(held) in types]
    return tuple([held for held in found if issubclass(type(held), kind)] for kind in kinds)


@contextmanager
def amp_off() -> Iterator[None]:
    """Turn off mixed precision that began earlier: open regions, and existing autocast and GradScaler objects."""
    with ExitStack() as stack:
        for held in itertools.chain(*find_premade(autocast, GradScaler)):
            stack.callback(setattr, held, "_enabled", held._enabled)
            if isinstance(held, autocast):  # read where the region is entered
                held._mezzo_left_off = not held._enabled  # type: ignore[attr-defined]
                stack.callback(delattr, held, "_mezzo_left_off")
            held._enabled = False
        for device_type in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield
