"""Scale the losses of Keras on JAX, and know of an update's gradients whether the loss scale is in them.

The loss scale is a variable of the ``LossScaleOptimizer``, which enters a step as a value. In ``fit`` Mezzo finds that value in
the state of ``train_step``. A loss that the script does not pass to ``scale_loss`` is multiplied by it in the differentiated
function, and its gradients are divided at once, so that the script's own clipping sees true gradients; before they reach the
optimizer, which divides them, they are multiplied again, exact for powers of two. A loop of the script's own keeps the value to
itself: there the script must scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import keras

from mezzo.errors import ScriptError
from mezzo.launch.keras.state import KerasRun, mixed_scaling

Method = Callable[..., Any]
_NUM_PASSES = 16
"""Number of backward passes that are remembered: enough for one training step of several models."""
_SCOPE = "with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, optimizer_variables))): loss = optimizer.scale_loss(loss)"
_HINT = (
    "wrap the optimizer in keras.optimizers.LossScaleOptimizer and scale the loss in the differentiated function, as Keras' own "
    f"train_step does: {_SCOPE}; --policy fp16:loss_scale=none trains without a loss scale, --policy bf16 needs none"
)


@dataclass(kw_only=True)
class BackwardPass:
    """The gradients of one differentiated function."""

    value: Any
    """The loss, without a scale of Mezzo's."""
    by_script: bool
    """Whether the script scaled the loss: its value and the gradients include the scale."""
    gradients: list[Any]
    """Empty after an update has used them."""
    is_used: bool = False
    shapes: list[tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self.shapes = _shapes(self.gradients)


class JaxScaling:
    """The scale of the step being traced or run, and its backward passes."""

    def __init__(self, run: KerasRun) -> None:
        self._run = run
        self._passes: list[BackwardPass] = []
        self._optimizer: Any = None
        """The LossScaleOptimizer of the ``train_step`` being traced or run, if it is known."""
        self._scale: Any = None
        """The value of its scale in this step."""
        self._depth = 0
        """How many functions are being differentiated, one inside another."""
        self._scaling: set[Any] = set()
        """The code of the differentiated functions in which the script has scaled a loss: one under jax.jit runs only once."""

    @contextmanager
    def step(self, optimizer: Any, values: Sequence[Any]) -> Iterator[None]:
        """Run a ``train_step`` inside; ``values`` are those of the optimizer's variables."""
        before = self._optimizer, self._scale
        self._passes = []
        if hasattr(optimizer, "dynamic_scale") and len(values) == len(optimizer.variables):
            self._optimizer, self._scale = optimizer, values[scale_index(optimizer)]
        try:
            yield
        finally:
            self._optimizer, self._scale = before

    # --- losses ------------------------------------------------------------------------------------------------------------------

    def scaled_loss(self, original: Method, optimizer: Any, loss: Any) -> tuple[Any, Any]:
        """Return what an optimizer's ``scale_loss`` makes of a loss, and the factor; None if it multiplies nothing.

        Raises:
            ScriptError: it would read the scale as a constant in a function that runs as Python only once.
        """
        optimizer = self._optimizer if optimizer is getattr(self._optimizer, "inner_optimizer", self) else optimizer
        if not hasattr(optimizer, "initial_scale"):
            return original(optimizer, loss), getattr(optimizer, "loss_scale_factor", None)
        scale = optimizer.dynamic_scale.value if optimizer.built else optimizer.initial_scale
        is_constant = not isinstance(scale, jax.core.Tracer) and self._run.scales and _is_staged()
        if is_constant and optimizer is not self._optimizer:
            raise ScriptError(
                "scale_loss is called in a jitted function outside a StatelessScope, where the loss scale is a constant; allowed: "
                "with the optimizer's variables that the function was given",
                hint=_SCOPE,
            )
        scale = self._scale if is_constant else scale
        return keras.ops.multiply(loss, scale), scale

    def differentiate(
        self, original: Method, function: Method, argnums: Any, *, has_aux: bool, settings: Any
    ) -> Method:
        """Return ``original(function, ...)``, which is ``jax.value_and_grad``, with the loss scaled and its gradients divided."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth or settings.get("holomorphic"):
                return original(function, argnums, has_aux, **settings)(*args, **kwargs)
            scale, by_script = self._scale, False

            @functools.wraps(function)
            def scaled(*args: Any, **kwargs: Any) -> Any:
                nonlocal by_script
                before = self._run.num_scaled
                result = function(*args, **kwargs)
                by_script = self._is_by_script(function, before)
                value, aux = result if has_aux else (result, None)
                is_ours = scale is not None and not by_script
                return (value * jnp.asarray(scale, value.dtype) if is_ours else value), (value, aux)

            self._depth += 1
            try:
                (_, (value, aux)), gradients = original(scaled, argnums, True, **settings)(*args, **kwargs)
            finally:
                self._depth -= 1
            if scale is not None and not by_script:
                gradients = jax.tree.map(lambda g: _divided(g, scale), gradients)
            self._passes = [p for p in self._passes if not p.is_used][1 - _NUM_PASSES :]
            self._passes.append(BackwardPass(value=value, by_script=by_script, gradients=jax.tree.leaves(gradients)))
            self._run.has_backward = True
            return ((value, aux) if has_aux else value), gradients

        return call

    def _is_by_script(self, function: Any, num_before: int) -> bool:
        code = _code(function)
        if self._run.num_scaled > num_before:
            self._scaling.add(code)
        return code in self._scaling

    # --- updates -----------------------------------------------------------------------------------------------------------------

    def used(self, gradients: Sequence[Any]) -> list[BackwardPass]:
        """Return the backward passes that gave these gradients, as far as can be told: those themselves, or those of their shapes."""
        known = {id(g) for g in gradients if g is not None}
        shapes = _shapes(gradients)
        return (
            [p for p in self._passes if any(id(g) in known for g in p.gradients)]
            or [p for p in self._passes if p.shapes == shapes]
            or list(self._passes)
        )

    def consume(self, passes: Sequence[BackwardPass]) -> list[BackwardPass]:
        """Return the passes that no update has used, and record that one has."""
        fresh = [p for p in passes if not p.is_used]
        for backward in passes:
            backward.is_used, backward.gradients = True, []
        return fresh

    def is_scaled(self, optimizer: Any, passes: Sequence[BackwardPass]) -> bool:
        """Return whether gradients include the optimizer's scale.

        Raises:
            ScriptError: the policy scales losses, and nothing has scaled theirs, or only some.
        """
        if not self._run.scales:
            return True
        if not hasattr(optimizer, "initial_scale"):
            raise ScriptError(
                f"a {type(optimizer).__name__} gets gradients of a loss without a loss scale, which on JAX mezzo run adds only to the "
                "optimizer of compile; allowed under a policy with a loss scale: a LossScaleOptimizer",
                hint=_HINT,
            )
        kinds = {p.by_script for p in passes}
        if len(kinds) > 1:
            raise mixed_scaling()
        if kinds == {True} or (not kinds and self._run.num_scaled):
            return True
        if optimizer is not self._optimizer or not kinds:
            raise ScriptError(
                "a LossScaleOptimizer, which divides gradients by the loss scale, gets gradients of a loss that nothing multiplied by it; "
                "allowed on JAX: a loss from its scale_loss, or a jax.grad or jax.value_and_grad in the train_step of fit",
                hint=_HINT,
            )
        return False


def scale_index(optimizer: Any) -> int:
    """Return the place of a LossScaleOptimizer's scale among its variables."""
    return next(k for k, variable in enumerate(optimizer.variables) if variable is optimizer.dynamic_scale)


def _divided(gradient: Any, scale: Any) -> Any:
    return gradient / jnp.asarray(scale, gradient.dtype)


def _shapes(gradients: Sequence[Any]) -> list[tuple[int, ...]]:
    return [tuple(g.shape) for g in gradients if g is not None]


def _code(function: Any) -> Any:
    """Return what stays the same of a function that is made anew in every step: the code inside partials, methods and jax.jit."""
    while True:
        inner = next(
            (found for name in ("func", "__func__", "__wrapped__") if (found := getattr(function, name, None))), None
        )
        if inner is None:
            return getattr(function, "__code__", function)
        function = inner


def _is_staged() -> bool:
    """Return whether operations become part of a jitted function instead of running."""
    return isinstance(jnp.float32(0) + jnp.float32(0), jax.core.Tracer)
