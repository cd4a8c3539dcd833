"""Show a Paddle script unscaled gradients in its own hooks, and in the ``.grad`` that it retains of a tensor inside a graph.

A gradient inside a graph is scaled while the backward pass runs. A script's hook is given it divided by the scale, and what it
returns is multiplied again.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import paddle

from mezzo.launch.patches import Patches

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
