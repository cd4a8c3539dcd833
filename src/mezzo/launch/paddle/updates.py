"""Patch a Paddle script's optimizers and schedulers: skip an update that overflowed, and the schedule's step after it.

Before an optimizer steps (``step`` and ``minimize``), the norm of its gradients is computed and, if the loss is scaled, one
flag is read. After an overflow the optimizer is not called at all, so that neither its state nor its step count changes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import paddle
from paddle.nn import Layer
from paddle.optimizer import Optimizer
from paddle.optimizer.lr import LRScheduler

from mezzo.formats import FP32
from mezzo.launch.any_script import ScriptSchedules, name_in_scope, with_subclasses
from mezzo.launch.paddle.state import PaddleRun, dense, parameters_of
from mezzo.launch.paddle.surveys import is_half
from mezzo.launch.patches import Patches


class Updates:
    """Hooks before and after every optimizer step of a script."""

    def __init__(self, run: PaddleRun) -> None:
        self._run = run
        self._stepping = False
        self._counts: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
        """The number of updates, including skipped ones, and how many were skipped, by optimizer."""
        self._schedules = ScriptSchedules(self._updates_of)
        self._patches: Patches | None = None
        self._patched: set[type] = set()

    def install(self, patches: Patches) -> None:
        """Patch Paddle until ``patches`` are undone."""
        self._patches = patches
        for kind in with_subclasses(Optimizer):
            self._patch(kind)
        self._schedules.install(patches, LRScheduler)

    def _patch(self, kind: type) -> None:
        if kind in self._patched or self._patches is None:
            return
        self._patched.add(kind)
        for name in ("step", "minimize"):
            if name in vars(kind):
                self._patches.around(kind, name, self._step)
        if "__init__" in vars(kind):  # AdamW's does not call the base class's
            self._patches.around(kind, "__init__", self._construct)

    def _construct(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        for kind in type(optimizer).__mro__:  # a class of the script's own did not exist when the others were patched
            if issubclass(kind, Optimizer):
                self._patch(kind)
        self._run.optimizers.add(optimizer)
        original(optimizer, *args, **kwargs)
        number, parameters = self._run.owner(optimizer), set(map(id, parameters_of(optimizer)))
        if parameters and number not in self._run.names:
            self._run.names[number] = name_in_scope(parameters, Layer, libraries=("paddle", "mezzo")) or ""

    def _step(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Decide before an optimizer's step whether to run it."""
        if self._stepping or not paddle.in_dynamic_mode():
            return original(optimizer, *args, **kwargs)
        self._run.optimizers.add(optimizer)
        if takes_closure(optimizer):
            return self._by_closure(original, optimizer, args, kwargs)
        with self._run.own_work():
            norm = _norm(optimizer)
        skip = self._run.updated(norm)
        updates, skipped = self._counts.get(optimizer, (0, 0))
        self._counts[optimizer] = (updates + 1, skipped + skip)
        self._stepping = True
        try:
            return ([], []) if skip or self._run.withholds_updates else original(optimizer, *args, **kwargs)
        finally:
            self._stepping = False
            self._after(optimizer, made=not skip)

    def _by_closure(self, original: Callable[..., Any], optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Run an optimizer that evaluates the loss itself; record its first evaluation, and undo a step in which any overflowed."""
        run = self._run
        run.close_update()
        if run.observer is not None:
            run.observer.closure_met(type(optimizer).__name__)
        step = ClosureStep(run, optimizer, _norm)
        self._stepping = run.in_closure = True
        try:
            return original(
                optimizer, *map(step.watched, [*args, *kwargs.values()])
            )  # the closure is the only argument
        finally:
            self._stepping = run.in_closure = False
            skip = run.updated(step.norm)
            if skip:
                step.undo()
            self._after(optimizer, made=not skip)

    def _after(self, optimizer: Any, *, made: bool) -> None:
        run = self._run
        if made:
            run.round_weights(parameters_of(optimizer))
        run.update_made(optimizer)
        if run.observer is not None:
            run.observer.update_ended(optimizer)
        for watcher in run.watchers:
            watcher()

    def _updates_of(self, scheduler: Any) -> tuple[int, int]:
        counts = [count for o, count in self._counts.items() if getattr(o, "_learning_rate", None) is scheduler]
        return max(counts, default=(0, 0))


def _norm(optimizer: Any) -> Any | None:
    """Return the norm of an optimizer's gradients in FP32; None if there are no gradients."""
    gradients = [dense(p.grad) for p in parameters_of(optimizer) if p.grad is not None]
    wide = [g.astype(FP32.dtype_name) if is_half(g) else g for g in gradients]
    squares = [paddle._C_ops.squared_l2_norm(g) for g in wide]
    return paddle.add_n(squares).sqrt().astype(FP32.dtype_name).reshape([]) if squares else None


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
