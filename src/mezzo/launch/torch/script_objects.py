"""The models and optimizers that a script was found to train: the script's names for them, and how their states are restored."""

from __future__ import annotations

import copy
import gc
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo.engine.gradients import trained_leaves
from mezzo.launch.any_script import name_in_scope
from mezzo.launch.request import ModelChanges
from mezzo.launch.torch.model_changes import ChangedModels
from mezzo.launch.torch.notes import RunNotes
from mezzo.launch.torch.open_update import OpenUpdate
from mezzo.measure.plain_steps import Owners
from mezzo.observe.observer import ModuleTree


class ScriptObjects:
    """A script's models and optimizers."""

    def __init__(self) -> None:
        # Weak, so that the models of a script that trains one after the other are not all kept.
        self.roots: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
        """Modules called from outside any module, in order."""
        self.tree = ModuleTree()
        self.optimizers: WeakKeyDictionary[torch.optim.Optimizer, None] = WeakKeyDictionary()
        self.existing = ExistingOptimizers(self.optimizers)
        self.numbers = OptimizerOwners()
        self.on_root_call: Callable[[nn.Module, Any], None] | None = None
        """Called with every module that is called from outside any module, and its arguments; None to call nothing."""
        self.changed_models: ChangedModels | None = None
        """What is changed in the models besides their precision; None for nothing."""

    def change_models(self, changes: ModelChanges, update: OpenUpdate, notes: RunNotes) -> ChangedModels:
        """Change every model at its first call."""
        self.changed_models = ChangedModels(update, notes, changes)
        return self.changed_models

    def owns(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether an optimizer of the script trains one of ``parameters``."""
        trained = {id(p) for o in self.optimizers for p in trained_leaves(o)}
        return any(id(p) in trained for p in parameters)

    def notify_of_calls(self, listener: Callable[[nn.Module, Any], None]) -> None:
        """Call ``listener`` at every call of a module from outside any module."""
        self.on_root_call = listener

    def end_notices(self) -> None:
        """Call no listener any more."""
        self.on_root_call = None


# An optimizer that is recreated for the same parameters keeps its number.

_WALKED_UPDATES = 3
_NAMED_UPDATES = 64


class OptimizerOwners:
    """The optimizers of a script by number and by name."""

    def __init__(self) -> None:
        self._numbers = WeakTensorKeyDictionary()
        """The number of each parameter's optimizer."""
        self._known: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        """The number of each optimizer."""
        self._num = 0
        self.names: dict[int, str] = {}

    def number(self, optimizer: torch.optim.Optimizer) -> int | None:
        """Return an optimizer's number; None for one without parameters."""
        if (known := self._known.get(optimizer)) is not None:
            return known
        parameters = trained_leaves(optimizer)
        if not parameters:
            return None
        self._add(parameters)
        number: int = self._numbers[parameters[0]]
        self._known[optimizer] = number
        return number

    def created(self, optimizer: torch.optim.Optimizer) -> None:
        """Record an optimizer under construction, and its model's name in the calling frames."""
        number = self.number(optimizer)
        if number is not None and number not in self.names:
            trained = set(map(id, trained_leaves(optimizer)))
            name = name_in_scope(trained, nn.Module, libraries=("torch", "mezzo"))
            if name is not None:
                self.names[number] = name

    def _add(self, parameters: Sequence[Tensor]) -> None:
        """Number an optimizer's parameters: with the number that at least half of them have, or with a new one."""
        numbers = [self._numbers[p] for p in parameters if p in self._numbers]
        number = max(set(numbers), key=numbers.count, default=None)
        if number is None or 2 * numbers.count(number) < len(parameters):
            number = self._num
            self._num += 1
        self._numbers.update(dict.fromkeys(parameters, number))

    def may_need_reach(self, num_steps: int) -> bool:
        """Return whether to find the optimizers that a backward pass reaches: if there are several, in the first few updates."""
        return self._num > 1 and num_steps < _WALKED_UPDATES

    def may_need_names(self, num_steps: int) -> bool:
        """Return whether to find the script's names of its losses: if there are several optimizers, until each has made updates."""
        return self._num > 1 and num_steps < _NAMED_UPDATES

    def reached(self, leaves: Iterable[Tensor]) -> Owners:
        """Return the optimizers that train one of ``leaves``, by number."""
        return frozenset(number for leaf in leaves if (number := self._numbers.get(leaf)) is not None)


# Parameters, gradients, buffers, learning rates, schedules and random number generators are restored. Anything else, such as the
# position of an iterator that it reads from, is not.


@contextmanager
def state_restored() -> Iterator[list[Any]]:
    """Restore every module, optimizer, scheduler and random number generator at the end; yield the optimizers."""
    optimizers, modules, schedulers = find_existing(torch.optim.Optimizer, nn.Module, LRScheduler)
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


def find_existing(*kinds: type) -> tuple[list[Any], ...]:
    """Return the live objects of each of ``kinds`` and its subclasses."""
    objects = gc.get_objects()
    types = {kind for kind in set(map(type, objects)) if issubclass(kind, kinds)}
    found = [obj for obj in objects if type(obj) in types]
    return tuple([obj for obj in found if issubclass(type(obj), kind)] for kind in kinds)


@contextmanager
def amp_off() -> Iterator[None]:
    """Turn off mixed precision that is already set up: open regions, and existing autocast and GradScaler objects."""
    with ExitStack() as stack:
        for switch in itertools.chain(*find_existing(autocast, GradScaler)):
            stack.callback(setattr, switch, "_enabled", switch._enabled)
            if isinstance(switch, autocast):  # read where the region is entered
                switch._mezzo_left_off = not switch._enabled  # type: ignore[attr-defined]
                stack.callback(delattr, switch, "_mezzo_left_off")
            switch._enabled = False
        for device_type in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield
