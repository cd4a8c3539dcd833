"""Scale a Paddle script's backward passes, and unscale every gradient before the script sees it.

The gradient from which a backward pass starts is multiplied by the loss scale, and a hook on every leaf of the graph (``leaves``) divides
its gradient by the scale before it is added to ``.grad``. The script sees unscaled losses and gradients, so its clipping,
accumulation and logs need no change. All of Paddle's backward passes end in one function of its core.

Not covered: gradients from ``paddle.grad``, such as for a penalty. They are not scaled, so small ones vanish where they are rounded.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakValueDictionary

import paddle

from mezzo.errors import ScriptError
from mezzo.launch.paddle.state import PaddleRun, parameters_of
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
        self.begins: Callable[[], Any] = lambda: None
        """Called before every backward pass."""

    def install(self, patches: Patches) -> None:
        """Patch Paddle until ``patches`` are undone."""
        patches.around(paddle.base.core.eager, "run_backward", self._run_backward)
        patches.around(paddle.base.core.eager, "run_partial_grad", self._run_partial)
        if self._run.scale.checks:
            self._leaves.install(patches)
            self._hooks.install(patches)

    def _run_backward(
        self, original: Callable[..., Any], tensors: Any, grad_tensors: Any = (), *args: Any, **kwargs: Any
    ) -> Any:
        run, local = self._run, self._run.local
        if local.in_backward:  # inside activation checkpointing: the outer pass has begun and is scaled
            return original(tensors, grad_tensors, *args, **kwargs)
        self.begins()
        starts = list(grad_tensors or []) or [None] * len(tensors)
        run.backward_from(tensors, starts)
        if run.scale.checks:
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
        if self._run.scale.checks and not self._run.local.in_backward:
            self._leaves.check(outputs, list(self._leaves))
        try:
            gradients = original(outputs, *args, **kwargs)
        finally:
            self._factors = before
        if self._run.scale.checks:
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
                    "the loss depends on a tensor that takes gradients and that Mezzo has not seen, so its gradient cannot be unscaled; "
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
