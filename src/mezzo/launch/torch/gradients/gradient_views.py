"""Unscale gradients inside the graph wherever the script sees them: in tensor hooks, in module hooks, and where it retains them.

A gradient inside the graph is scaled while the backward pass runs. The arguments of a script's hook are divided by the scale, and
its result is multiplied by it again; gradients that the script retains are divided once the pass is over.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo.launch.patches import Patches
from mezzo.launch.torch.direct_calls import WITHOUT_MODE_CHECK


class UnscaledViews:
    """Wrappers around a script's gradient hooks, and the tensors inside a graph that retain a ``.grad``."""

    def __init__(self, inverse: Callable[[], Tensor | None], *, on_hook: Callable[[], None]) -> None:
        """Create the views.

        Args:
            inverse: returns the factor that unscales at present; None if nothing is scaled.
            on_hook: called when the script sets a hook on a gradient inside a graph, or retains one.
        """
        self._inverse, self._on_hook = inverse, on_hook
        self._retained = WeakTensorKeyDictionary()

    def install(self, patches: Patches) -> None:
        """Wrap hooks until ``patches`` are undone."""
        patches.around(Tensor, "register_hook", self._register_on_tensor)
        patches.around(Tensor, "retain_grad", self._retain_grad)
        for name in ("register_full_backward_hook", "register_full_backward_pre_hook"):
            patches.around(nn.Module, name, self._register_on_module)

    @property
    def any_retained(self) -> bool:
        """Whether a tensor inside a graph retains its gradient."""
        return bool(self._retained.data)  # a check in every step: .data saves a Python call

    @contextmanager
    def of_inner_gradients(self, inputs: Any) -> Iterator[None]:
        """Unscale the gradients that the backward pass inside leaves in tensors that are not leaves."""
        requested = [t for t in tree_leaves(inputs) if isinstance(t, Tensor) and not t.is_leaf]
        with warnings.catch_warnings():
            if requested:
                warnings.simplefilter("ignore")  # about reading the .grad of a tensor that does not retain it
            before = {id(t): (t, t.grad) for t in (*self._retained.keys(), *requested)}
        for tensor, _ in before.values():
            tensor.grad = None
        inverse = self._inverse()
        yield
        for tensor, earlier in before.values():
            added = tensor.grad if tensor.grad is None or inverse is None else tensor.grad * inverse
            tensor.grad = earlier if added is None else added if earlier is None else earlier + added

    def _register_on_tensor(self, original: Callable[..., Any], tensor: Tensor, hook: Callable[..., Any]) -> Any:
        # Under a function mode, torch's own function would call this replacement, by the name in its module.
        register = WITHOUT_MODE_CHECK.get(original, original)
        if tensor.is_leaf:
            return register(tensor, hook)
        self._on_hook()
        return register(tensor, self._with_unscaled(hook))

    def _register_on_module(
        self, original: Callable[..., Any], module: nn.Module, hook: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        return original(module, self._with_unscaled(hook), *args, **kwargs)

    def _with_unscaled(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def call(*args: Any) -> Any:
            inverse = self._inverse()
            if inverse is None:
                return hook(*args)
            result = hook(*tree_map_only(Tensor, lambda g: g * inverse, args))
            return tree_map_only(Tensor, lambda g: g / inverse, result)

        return call

    def _retain_grad(self, original: Callable[..., Any], tensor: Tensor) -> None:
        original(tensor)
        if not tensor.is_leaf:
            self._on_hook()
            self._retained[tensor] = None
