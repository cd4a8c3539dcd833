"""Undo the step of an optimizer that evaluates the loss itself, as LBFGS does, if the gradients of any evaluation overflowed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import paddle

from mezzo.launch.paddle.state import PaddleRun, parameters_of


def takes_closure(optimizer: Any) -> bool:
    """Return whether an optimizer's step evaluates the loss itself: both of Paddle's LBFGS, and classes like them."""
    return "closure" in inspect.signature(type(optimizer).step).parameters and isinstance(optimizer.state, dict)


class ClosureStep:
    """One such step, with the weights and the state before it if the loss is scaled."""

    def __init__(self, run: PaddleRun, optimizer: Any, norm_of: Callable[[Any], Any]) -> None:
        self._run, self._optimizer, self._norm_of = run, optimizer, norm_of
        self.norm: Any = None
        """The norm of the last evaluation's gradients, or the first that is not finite; None before any."""
        self._weights: list[tuple[Any, Any]] = []
        self._state: dict[str, Any] = {}
        if run.scale.checks:
            with run.own_work(), paddle.no_grad():
                self._weights = [(p, p.clone()) for p in parameters_of(optimizer)]
                self._state = _copied(dict(optimizer.state))

    def watched(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure, which keeps the norm of its gradients."""

        @functools.wraps(closure)
        def evaluate() -> Any:
            result = closure()
            with self._run.own_work(), paddle.no_grad():
                norm = self._norm_of(self._optimizer)
                if self.norm is None or norm is None or bool(self.norm.isfinite()):
                    self.norm = norm
            return result

        return evaluate

    def undo(self) -> None:
        """Restore the weights and the state."""
        with self._run.own_work(), paddle.no_grad():
            for parameter, before in self._weights:
                paddle.assign(before, parameter)
            self._optimizer.state.clear()
            self._optimizer.state.update(self._state)


def _copied(value: Any) -> Any:
    """Return a copy of an optimizer's state, whose tensors and lists the step changes in place."""
    if isinstance(value, paddle.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value
