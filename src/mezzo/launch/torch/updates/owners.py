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
from mezzo.measure.apart import Owners

_WALKED_UPDATES = 3


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
        self._add(optimizer, parameters)
        found: int = self._numbers[parameters[0]]
        self._known[optimizer] = found
        return found

    def made(self, optimizer: torch.optim.Optimizer) -> None:
        """Record an optimizer under construction, and its model's name in the calling frames."""
        number = self.number(optimizer)
        if number is not None and number not in self.names:
            held = set(map(id, trained_leaves(optimizer)))
            name = name_in_scope(held, nn.Module, libraries=("torch", "mezzo"))
            if name is not None:
                self.names[number] = name

    def _add(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
        held = [self._numbers[p] for p in parameters if p in self._numbers]
        same = max(set(held), key=held.count, default=None)
        if same is None or 2 * held.count(same) < len(parameters):
            same = self._num
            self._num += 1
        self._numbers.update(dict.fromkeys(parameters, same))

    def may_need_reach(self, num_steps: int) -> bool:
        """Return whether to find the optimizers that a backward pass reaches: several exist, and only few updates were recorded."""
        return self._num > 1 and num_steps < _WALKED_UPDATES

    def reached(self, leaves: Iterable[Tensor]) -> Owners:
        """Return the optimizers that train one of ``leaves``, by number."""
        return frozenset(number for leaf in leaves if (number := self._numbers.get(leaf)) is not None)
