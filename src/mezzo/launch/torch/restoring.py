"""Restore what a function changes by training, so that it can be called again from the same state.

Parameters, gradients, buffers, learning rates, schedules and random number generators are restored. Anything else, such as the
position of an iterator that it reads from, is not.
"""

from __future__ import annotations

import copy
import gc
import itertools
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from mezzo.engine.gradients import trained_leaves


@contextmanager
def state_restored() -> Iterator[list[Any]]:
    """Restore every module, optimizer, scheduler and random number generator at the end; yield the optimizers."""
    optimizers, modules, schedulers = find_premade(torch.optim.Optimizer, nn.Module, LRScheduler)
    with ExitStack() as stack:
        _restore_random_numbers(stack)
        for module in modules:
            _restore_module(stack, module)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                stack.callback(group.update, {k: copy.copy(v) for k, v in group.items() if k != "params"})
        for scheduler in schedulers:
            stack.callback(scheduler.__dict__.update, _plain_state(scheduler))
        yield optimizers


def _plain_state(scheduler: Any) -> dict[str, Any]:
    kept = {k: v for k, v in vars(scheduler).items() if isinstance(v, (int, float, str, list, tuple, dict))}
    return {k: copy.copy(v) for k, v in kept.items()}


def _restore_random_numbers(stack: ExitStack) -> None:
    stack.callback(random.setstate, random.getstate())
    stack.callback(torch.set_rng_state, torch.get_rng_state())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        stack.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        stack.callback(numpy.random.set_state, numpy.random.get_state())


def _restore_module(stack: ExitStack, module: Any) -> None:
    attributes = module.__dict__
    if not isinstance(attributes.get("_parameters"), dict):  # a module under construction, or a stand-in
        return
    forward = attributes.get("forward")
    if forward is None:
        stack.callback(attributes.pop, "forward", None)
    else:
        stack.callback(attributes.__setitem__, "forward", forward)
    stack.callback(attributes.__setitem__, "training", attributes.get("training", True))
    for parameter in attributes["_parameters"].values():
        if parameter is not None:
            gradient = None if parameter.grad is None else parameter.grad.clone()
            stack.callback(_restore, parameter, parameter.data, gradient)
    for buffer in attributes["_buffers"].values():
        if buffer is not None:
            stack.callback(_assign, buffer, buffer.data, buffer.detach().clone())


def _restore(parameter: Any, storage: Any, gradient: Any) -> None:
    parameter.grad = None  # a gradient of another format would not fit the weight
    parameter.data = storage
    parameter.grad = gradient


def _assign(buffer: Any, storage: Any, value: Any) -> None:
    buffer.data = storage  # its own storage again, if it was cast
    buffer.data.copy_(value)


# A notebook's heap has a million objects; since each type is checked only once, a walk takes 0.1 s.
# ``isinstance`` would query the objects themselves, which triggers the proxies of other libraries. Objects hidden from the
# collector by ``gc.freeze`` are not found.

_SEARCHED_UPDATES = 3


class ExistingOptimizers:
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
