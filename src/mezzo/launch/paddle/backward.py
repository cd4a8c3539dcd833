"""Scale a Paddle script's losses: no gradient that the script sees is scaled, and an update that overflowed is skipped.

The gradient from which a backward pass starts is multiplied by the loss scale, and a hook on every leaf of the graph (``leaves``) divides
its gradient by the scale before it is added to ``.grad``. The script sees unscaled losses and gradients, so its clipping,
accumulation and logs need no change. All of Paddle's backward passes end in one function of its core.

Not covered: gradients from ``paddle.grad``, such as for a penalty. They are not scaled, so small ones vanish where they are rounded.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import paddle
from paddle.nn import Layer
from paddle.optimizer import Optimizer
from paddle.optimizer.lr import LRScheduler

from mezzo.errors import ScriptError
from mezzo.formats import FP32
from mezzo.launch.any_script import ScriptSchedules, name_in_scope, with_subclasses
from mezzo.launch.paddle.state import PaddleRun, dense, parameters_of
from mezzo.launch.paddle.surveys import is_half
from mezzo.launch.patches import Patches


class BackwardPasses:
    """Hooks before and after every backward pass."""

    def __init__(self, run: PaddleRun) -> None:
        self._run = run
        self._leaves = Leaves(run)
        self._hooks = ScriptHooks(lambda: self._factors, on_leaf=self._hook)
        self._hooked: WeakValueDictionary[int, Any] = WeakValueDictionary()
        """The leaves that have a hook; after the run it does nothing, because no pass is scaled."""
        self._factors: tuple[float, float] | None = None
        """The loss scale of the running pass, and its inverse; None outside a scaled pass."""
        self.before: list[Callable[[], Any]] = []
        """Called before every backward pass."""

    def install(self, patches: Patches) -> None:
        """Patch Paddle until ``patches`` are undone."""
        patches.around(paddle.base.core.eager, "run_backward", self._run_backward)
        patches.around(paddle.base.core.eager, "run_partial_grad", self._run_partial)
        if self._run.scale.skips_overflows:
            self._leaves.install(patches)
            self._hooks.install(patches)

    def _run_backward(
        self, original: Callable[..., Any], tensors: Any, grad_tensors: Any = (), *args: Any, **kwargs: Any
    ) -> Any:
        run, local = self._run, self._run.local
        if local.in_backward:  # inside activation checkpointing: the outer pass has begun and is scaled
            return original(tensors, grad_tensors, *args, **kwargs)
        for begins in self.before:
            begins()
        starts = list(grad_tensors or []) or [None] * len(tensors)
        run.backward_from(tensors, starts)
        if run.scale.skips_overflows:
            leaves = list(self._leaves)
            for leaf in leaves:  # each time, because a script may unfreeze one at any time
                self._hook(leaf)
            self._leaves.check(tensors, leaves)
            self._factors = run.scale.value, run.scale.inverse
            grad_tensors = starts = self._scaled(tensors, starts)
        if run.observer is not None:
            run.observer.scaled(tensors, starts)
        before, local.depth, local.in_backward = local.depth, 1, True  # recomputed code is under the policy
        try:
            return original(tensors, grad_tensors, *args, **kwargs)
        finally:
            local.depth, local.in_backward, self._factors = before, False, None
            if run.observer is not None:
                run.observer.backward_ended()

    def _run_partial(self, original: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run ``paddle.grad``, which is not scaled: inside a script's own backward function its results are not unscaled."""
        before, self._factors = self._factors, None
        if self._run.scale.skips_overflows and not self._run.local.in_backward:
            self._leaves.check(outputs, list(self._leaves))
        try:
            gradients = original(outputs, *args, **kwargs)
        finally:
            self._factors = before
        if self._run.scale.skips_overflows:
            self._leaves.ignore(gradients)
        return gradients

    def _scaled(self, tensors: Any, starts: list[Any]) -> list[Any]:
        pairs = zip(tensors, starts, strict=True)
        scale = self._run.scale.value
        with self._run.own_work():
            return [paddle.full_like(t, scale) if g is None else g * scale for t, g in pairs]

    def _hook(self, leaf: Any) -> None:
        if self._hooked.get(id(leaf)) is not leaf:
            self._hooked[id(leaf)] = leaf
            observe_gradient(leaf, self._unscale)

    def _unscale(self, gradient: Any) -> Any:
        """Return ``gradient`` / scale, with NaN for infinity: an overflow must survive a script's clamp of its gradients."""
        if self._factors is None:
            return None
        with paddle.no_grad(), self._run.in_fp32(), self._run.own_work():
            unscaled = gradient * self._factors[1]
            return unscaled if gradient.is_selected_rows() else paddle._C_ops.add_(unscaled, gradient * 0.0)


# Paddle has no list of them, and a graph names its leaves only by number. So every tensor that is told to take gradients is remembered
# from then on, besides the parameters of layers and optimizers that existed before; each graph is then searched for a leaf that is not
# among them.

_CREATION: Any = importlib.import_module("paddle.tensor.creation")
_ACCUMULATION = "GradNodeAccumulation"
"""Paddle's name for the end of a graph, which adds a gradient to the ``.grad`` of a leaf."""


class Leaves:
    """The leaves that are known, of which none is kept alive."""

    def __init__(self, run: PaddleRun) -> None:
        self._run = run
        self._told: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._paddles_own: set[int] = set()
        """Leaves that ``paddle.grad`` itself makes, which no script can read."""
        self._of_layers: list[Any] = []
        self._num_roots = 0

    def install(self, patches: Patches) -> None:
        """Remember tensors that are told to take gradients until ``patches`` are undone."""
        original = vars(paddle.Tensor)["stop_gradient"]

        def tell(tensor: Any, stop: bool) -> None:
            original.__set__(tensor, stop)
            self._told_to(tensor)

        patches.replace(paddle.Tensor, "stop_gradient", property(original.__get__, tell))
        patches.around(_CREATION, "_to_tensor_non_static", self._create)

    def _create(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a tensor from data, which may be told in compiled code to take gradients."""
        tensor = original(*args, **kwargs)
        self._told_to(tensor)
        return tensor

    def _told_to(self, tensor: Any) -> None:
        if (
            not tensor.stop_gradient and not self._run.local.in_backward
        ):  # there, Paddle cuts graphs for activation checkpointing
            self._told[id(tensor)] = tensor

    def __iter__(self) -> Iterator[Any]:
        """Yield every leaf that takes gradients now, each once."""
        run = self._run
        if len(run.roots) != self._num_roots:  # a large model takes milliseconds to list
            self._num_roots, self._of_layers = len(run.roots), run.parameters()
        of_optimizers = [p for optimizer in list(run.optimizers) for p in parameters_of(optimizer)]
        known = {id(tensor): tensor for tensor in [*self._told.values(), *self._of_layers, *of_optimizers]}
        return (tensor for tensor in known.values() if not tensor.stop_gradient and tensor.is_leaf)

    def ignore(self, gradients: Iterable[Any]) -> None:
        """Know the leaves that ``paddle.grad`` has made for these results."""
        self._paddles_own.update(_accumulations(gradients))

    def check(self, roots: Iterable[Any], known: Iterable[Any]) -> None:
        """Refuse a graph that has an unknown leaf: its gradient would stay multiplied by the loss scale.

        Raises:
            ScriptError: it has one.
        """
        nodes = {tensor.grad_fn.node_ptr() for tensor in known} | self._paddles_own
        for pointer in _accumulations(roots):
            if pointer not in nodes:
                raise ScriptError(
                    "the loss depends on an unknown tensor that takes gradients, so its gradient cannot be unscaled; "
                    "allowed: parameters of layers and optimizers, and tensors whose stop_gradient the script sets",
                    hint="set stop_gradient = False on the tensor in the script, or use a policy without a loss scale, such as bf16",
                )


def _accumulations(roots: Iterable[Any]) -> Iterator[int]:
    """Yield the number of each leaf of a graph once."""
    waiting, seen = [tensor.grad_fn for tensor in roots if tensor is not None], set[int]()
    while waiting:
        node = waiting.pop()
        if node is None or node.node_ptr() in seen:
            continue
        seen.add(node.node_ptr())
        if node.name() == _ACCUMULATION:
            yield node.node_ptr()
        waiting += node.next_functions


# A gradient inside a graph is scaled while the backward pass runs. A script's hook is given it divided by the scale, and what it
# returns is multiplied again.

observe_gradient: Callable[[Any, Callable[[Any], Any]], Any] = paddle.Tensor.register_hook
"""Register a hook of Mezzo's own on a tensor: it is given the gradient as it is, scaled."""


class ScriptHooks:
    """Wrappers around a script's gradient hooks, and the tensors inside graphs whose gradients it retains."""

    def __init__(self, factors: Callable[[], tuple[float, float] | None], *, on_leaf: Callable[[Any], None]) -> None:
        """Create the wrappers.

        Args:
            factors: returns the loss scale of the running backward pass and its inverse; None if nothing is scaled.
            on_leaf: called with a leaf before the script hooks it, so that Mezzo's own hook comes first.
        """
        self._factors, self._on_leaf = factors, on_leaf
        self._retained: dict[int, tuple[weakref.ref[Any], float]] = {}
        """The tensors whose gradient is scaled, by their identity, with the inverse of that scale."""

    def install(self, patches: Patches) -> None:
        """Wrap hooks and gradients until ``patches`` are undone."""
        patches.around(paddle.Tensor, "register_hook", self._register)
        patches.around(paddle.Tensor, "retain_grads", self._retain)
        original = vars(paddle.Tensor)["grad"]
        show = functools.partial(self._grad, original.__get__)
        patches.replace(paddle.Tensor, "grad", property(show, original.__set__, original.__delete__))

    def _register(self, original: Callable[..., Any], tensor: Any, hook: Callable[[Any], Any]) -> Any:
        if tensor.is_leaf:
            self._on_leaf(tensor)
            return original(tensor, hook)

        def unscaled(gradient: Any) -> Any:
            factors = self._factors()
            if factors is None:
                return hook(gradient)
            scale, inverse = factors
            changed = hook(gradient * inverse)
            return None if changed is None else changed * scale

        return original(tensor, unscaled)

    def _retain(self, original: Callable[..., Any], tensor: Any) -> Any:
        if not tensor.is_leaf and id(tensor) not in self._retained:
            key = id(tensor)
            self._retained[key] = weakref.ref(tensor, lambda _: self._retained.pop(key)), 1.0
            observe_gradient(tensor, functools.partial(self._arrived, key))
        return original(tensor)

    def _arrived(self, key: int, _: Any) -> None:
        factors = self._factors()
        if key in self._retained and factors is not None:
            self._retained[key] = self._retained[key][0], factors[1]

    def _grad(self, original: Callable[..., Any], tensor: Any) -> Any:
        gradient = original(tensor)
        if gradient is None or id(tensor) not in self._retained:
            return gradient
        with paddle.no_grad():
            return gradient * self._retained[id(tensor)][1]


# Before an optimizer steps (``step`` and ``minimize``), the norm of its gradients is computed and, if the loss is scaled, one
# flag is read. After an overflow the optimizer is not called at all, so that neither its state nor its step count changes.


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
        self._stepping = True
        try:
            with run.evaluating():
                return original(optimizer, *map(step.watched, [*args, *kwargs.values()]))  # the closure alone
        finally:
            self._stepping = False
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
        if run.scale.skips_overflows:
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
