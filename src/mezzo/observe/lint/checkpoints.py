"""Check that checkpoints which a training can resume from contain the GradScaler's state.

Only what a script saves is read: dictionaries with the keys of ``Optimizer.state_dict()``. A checkpoint without an optimizer's state is for
evaluation and needs no scaler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from mezzo.observe.lint.misuse_log import MisuseLog
from mezzo.observe.source_lines import running_line

_OF_AN_OPTIMIZER = {"state", "param_groups"}
_MAX_DEPTH = 4
_MAX_SAVES = 1000


class Checkpoints:
    """The checkpoints of a script, and the GradScalers whose state it has taken."""

    def __init__(self, log: MisuseLog) -> None:
        self._log = log
        self._taken: WeakSet[Any] = WeakSet()
        self._saves: list[tuple[str, int]] = []
        """The line and the step of each checkpoint with an optimizer's state."""
        self._loses: WeakSet[Any] = WeakSet()
        """The scalers that were in use at one of them."""

    def state_taken(self, scaler: Any) -> None:
        """Record that the script takes a scaler's state, with ``state_dict()`` or by pickling the scaler."""
        self._taken.add(scaler)

    def saved(self, value: Any, in_use: Callable[[], list[tuple[Any, float | None]]], *, step: int) -> None:
        """Record that the script saves ``value``.

        Args:
            value: what is written.
            in_use: returns the scalers that have stepped, each with the scale that the script read last.
            step: the number of the step.
        """
        if len(self._saves) >= _MAX_SAVES or not any(_is_of_an_optimizer(v) for v in _inside(value)):
            return
        lost = [scaler for scaler, scale in in_use() if not _keeps(value, scale)]
        if lost:
            self._saves.append((running_line(), step))
            self._loses.update(lost)

    def report(self) -> None:
        """Report the checkpoints if the state of a scaler was never taken: it may also be saved to a file of its own."""
        saves, self._saves = self._saves, []
        lost = [s for s in self._loses if s not in self._taken and type(s).state_dict is GradScaler.state_dict]
        for line, step in saves if lost else ():
            detail = "a checkpoint has an optimizer's state, and state_dict() of the GradScaler is never called"
            self._log.add("A617", detail, line=line, step=step)


def _is_of_an_optimizer(value: Any) -> bool:
    return isinstance(value, Optimizer) or (isinstance(value, dict) and value.keys() >= _OF_AN_OPTIMIZER)


def _keeps(value: Any, scale: float | None) -> bool:
    """Return whether a checkpoint contains the scale as a number."""
    return scale is not None and any(isinstance(v, float) and v == scale for v in _inside(value))


def _inside(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield a value and what is inside it, but not what is inside an optimizer's state."""
    yield value
    if depth < _MAX_DEPTH and not _is_of_an_optimizer(value):
        value = vars(value) if isinstance(value, SimpleNamespace) or is_dataclass(value) else value
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        for item in items:
            yield from _inside(item, depth + 1)
