"""The models and optimizers that a script was found to train, and the script's names for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo.engine.gradients import trained_leaves
from mezzo.launch.any_script import name_in_scope
from mezzo.launch.request import ModelChanges
from mezzo.launch.torch.model_changes import ChangedModels
from mezzo.launch.torch.notes import RunNotes
from mezzo.launch.torch.open_update import OpenUpdate
from mezzo.launch.torch.restoring import ExistingOptimizers
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
