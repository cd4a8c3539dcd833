"""Number a script's optimizers, and find what the script calls what they train.

An optimizer that is made anew for the same parameters keeps its number. Its name is that of the smallest module, among the variables
at hand where it was made, that holds all of its parameters: ``generator`` of ``Adam(generator.parameters())`` or of
``self.generator``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo.measure.apart import Owners

_MAX_FRAMES = 4
_USES_COPY = {"locals", "vars", "exec", "eval"}
"""A function that calls one of these may hold the copy of its variables that a frame makes before Python 3.13."""
_WALKED_UPDATES = 3


class OptimizerOwners:
    """Know the optimizers of a script by number and by name."""

    def __init__(self) -> None:
        self._numbers = WeakTensorKeyDictionary()
        """The number of the optimizer that holds a parameter."""
        self._known: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._num = 0
        self.names: dict[int, str] = {}

    def number(self, optimizer: torch.optim.Optimizer) -> int | None:
        """Return an optimizer's number; None for one without parameters."""
        parameters = _parameters(optimizer)
        if not parameters:
            return None
        if optimizer not in self._known:
            self._add(optimizer, parameters)
        found: int | None = self._numbers.get(parameters[0])
        return found

    def made(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note of an optimizer that is being made, in the frames above this one."""
        number = self.number(optimizer)
        if number is not None and number not in self.names:
            name = _name_of(_parameters(optimizer), sys._getframe(1))
            if name is not None:
                self.names[number] = name

    def _add(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
        self._known.add(optimizer)
        held = [self._numbers[p] for p in parameters if p in self._numbers]
        same = max(set(held), key=held.count, default=None)
        if same is None or 2 * held.count(same) < len(parameters):
            same = self._num
            self._num += 1
        self._numbers.update(dict.fromkeys(parameters, same))

    def may_need_reach(self, num_steps: int) -> bool:
        """Return whether it may matter which optimizers a backward pass reaches: several exist, and too few updates are known to tell."""
        return self._num > 1 and num_steps < _WALKED_UPDATES

    def reached(self, leaves: Iterable[Tensor]) -> Owners:
        """Return the optimizers that hold one of ``leaves``."""
        return frozenset(number for leaf in leaves if (number := self._numbers.get(leaf)) is not None)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _name_of(parameters: Sequence[Tensor], frame: FrameType | None) -> str | None:
    wanted, looked = set(map(id, parameters)), 0
    while frame is not None and looked < _MAX_FRAMES:
        if not _is_librarys(frame):
            looked += 1
            sizes = _sizes_of_modules(frame, holding=wanted)
            if sizes:
                return min(sizes, key=lambda found: found[0])[1]
        frame = frame.f_back
    return None


def _sizes_of_modules(frame: FrameType, *, holding: set[int]) -> list[tuple[int, str]]:
    """Return the number of parameters and the name of each module, among a frame's variables, that holds parameters of these identities."""
    copied = sys.version_info < (3, 13) and bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
    if copied and not _USES_COPY.isdisjoint(frame.f_code.co_names):
        return []
    variables = frame.f_locals
    sizes = [
        (len(held), name)
        for name, module in _modules_at_hand(variables)
        if holding <= (held := set(map(id, module.parameters())))
    ]
    if copied:  # the frame keeps the copy, and so would keep alive what the script lets go
        variables.clear()
    return sizes


def _is_librarys(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("torch", "mezzo")


def _modules_at_hand(variables: dict[str, Any]) -> Iterator[tuple[str, nn.Module]]:
    for name, value in list(variables.items()):
        if isinstance(value, nn.Module):
            yield name, value
    owner = variables.get("self")
    if isinstance(owner, nn.Module):
        yield from owner.named_children()
    else:
        yield from ((name, v) for name, v in getattr(owner, "__dict__", {}).items() if isinstance(v, nn.Module))
