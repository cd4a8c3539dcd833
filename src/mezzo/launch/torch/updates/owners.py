"""Number a script's optimizers, and find the script's names for what they train.

An optimizer that is recreated for the same parameters keeps its number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo.engine.gradients import trained_leaves
from mezzo.launch.model_names import name_in_scope
from mezzo.measure.plain_steps import Owners

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
