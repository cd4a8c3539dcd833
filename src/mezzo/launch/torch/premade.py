"""Find objects on the heap that a function's training made before the launcher's hooks were set.

A notebook's heap has a million objects: a walk takes 0.1 s, because each type is checked only once.
``isinstance`` would query the objects themselves, which triggers the proxies of other libraries. Objects hidden from the
collector by ``gc.freeze`` are not found.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler

from mezzo.engine.gradients import trained_leaves

_SEARCHED_UPDATES = 3


class PremadeOptimizers:
    """Optimizers made before the training began, some of them for earlier trainings of a notebook: those that are used are counted."""

    def __init__(self, counted: WeakKeyDictionary[torch.optim.Optimizer, None]) -> None:
        """Move optimizers to ``counted`` as backward passes reach their parameters."""
        self._counted = counted
        self._waiting: WeakSet[torch.optim.Optimizer] = WeakSet()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Wait for a backward pass that reaches one of ``optimizers``."""
        self._waiting.update(optimizers)

    def reached(self, leaves: Iterable[Tensor], num_updates: int) -> None:
        """Count the optimizers that hold one of ``leaves``, which a backward pass is about to reach.

        After some updates the search, a walk through the graph, ends: an optimizer reached later counts from its update on.
        """
        held = set(map(id, leaves))
        found = [o for o in self._waiting if any(id(p) in held for p in trained_leaves(o))]
        self._counted.update(dict.fromkeys(found))
        self._waiting.difference_update(found)
        if num_updates > _SEARCHED_UPDATES:
            self._waiting.clear()


def find_premade(*kinds: type) -> tuple[list[Any], ...]:
    """Return the live objects of each of ``kinds`` and its subclasses."""
    objects = gc.get_objects()
    types = {kind for kind in set(map(type, objects)) if issubclass(kind, kinds)}
    found = [held for held in objects if type(held) in types]
    return tuple([held for held in found if issubclass(type(held), kind)] for kind in kinds)


@contextmanager
def amp_off() -> Iterator[None]:
    """Turn off mixed precision from before: open regions, and existing autocast and GradScaler objects."""
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
