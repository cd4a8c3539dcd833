"""Find objects on the heap that were created before the launcher's hooks were set, for a function's training.

A notebook's heap has a million objects; since each type is checked only once, a walk takes 0.1 s.
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
    """Optimizers created before the training began, some for earlier trainings of a notebook: those that this training uses are counted."""

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
        """Count the optimizers that train one of ``leaves``, which a backward pass is about to reach.

        The search, a walk through the graph, ends after a few updates: an optimizer reached later counts from its first update on.
        """
        reached = set(map(id, leaves))
        used = [o for o in self._waiting if any(id(p) in reached for p in trained_leaves(o))]
        self._counted.update(dict.fromkeys(used))
        self._waiting.difference_update(used)
        if num_updates > _SEARCHED_UPDATES:
            self._waiting.clear()


def find_premade(*kinds: type) -> tuple[list[Any], ...]:
    """Return the live objects of each of ``kinds`` and its subclasses."""
    objects = gc.get_objects()
    types = {kind for kind in set(map(type, objects)) if issubclass(kind, kinds)}
    found = [obj for obj in objects if type(obj) in types]
    return tuple([obj for obj in found if issubclass(type(obj), kind)] for kind in kinds)


@contextmanager
def amp_off() -> Iterator[None]:
    """Turn off mixed precision that is already set up: open regions, and existing autocast and GradScaler objects."""
    with ExitStack() as stack:
        for switch in itertools.chain(*find_premade(autocast, GradScaler)):
            stack.callback(setattr, switch, "_enabled", switch._enabled)
            if isinstance(switch, autocast):  # read where the region is entered
                switch._mezzo_left_off = not switch._enabled  # type: ignore[attr-defined]
                stack.callback(delattr, switch, "_mezzo_left_off")
            switch._enabled = False
        for device_type in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield
