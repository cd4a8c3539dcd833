"""Patch the updates of Keras' optimizers: each is recorded, and scaled, checked and skipped according to the policy.

``LossScaleOptimizer`` does the scaling: ``compile`` or the script wraps it around an optimizer, or it
is wrapped around it here. All of them share the run's scale. Gradients reach it in one of two ways:

* a loss was passed to ``optimizer.scale_loss``, as in ``fit``: its gradients are scaled, and the optimizer divides them;
* the script computed gradients of the loss itself: the backward pass started from the scale instead of 1, and its results were
  divided by the scale immediately, so that the script's own clipping sees unscaled gradients. They are multiplied again before they
  reach ``LossScaleOptimizer``, which divides them: exact for powers of two.

If the policy scales nothing, a ``LossScaleOptimizer`` of the script passes everything through. Under ``as-is``
everything is only recorded.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mezzo.formats import STORED_BYTES
from mezzo.launch.keras.layers import Layers
from mezzo.launch.keras.state import Backend, KerasRun
from mezzo.launch.patches import Patches
from mezzo.policy import Policy

Method = Callable[..., Any]
_NEVER = 2**30
"""A growth interval so long that the scale never grows."""


class Updates:
    """The patches of Keras' optimizers."""

    def __init__(self, run: KerasRun, backend: Backend, layers: Layers) -> None:
        self._run, self._backend, self._layers = run, backend, layers
        self._wrapped: dict[int, Any] = {}
        """The LossScaleOptimizer wrapped around each optimizer, by the optimizer's id."""

    def install(self, patches: Patches) -> None:
        """Patch until ``patches`` are undone."""
        import keras

        optimizers = keras.optimizers
        self._scaler = optimizers.LossScaleOptimizer
        base = importlib.import_module("keras.src.optimizers.base_optimizer").BaseOptimizer
        for owner in {base, self._scaler, getattr(optimizers, "MultiOptimizer", base)}:
            patches.around(owner, "apply", self._apply)
        for owner in (base, self._scaler):
            patches.around(owner, "scale_loss", self._scale_loss)
        patches.around(self._scaler, "_stateful_handle_finite_grads", self._inner_update)
        if self._run.policy is not None:
            patches.around(self._scaler, "__init__", self._init)
            patches.around(self._scaler, "build", self._build)
            trainer = importlib.import_module("keras.src.trainers.trainer").Trainer
            patches.around(trainer, "compile", self._compile)

    # --- the scale is the policy's ---------------------------------------------------------------------------------------------

    def _init(self, original: Method, scaler: Any, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args, **kwargs)
        policy = self._run.policy
        assert policy is not None
        scaler.initial_scale = policy.init_scale if self._run.scales else 1.0
        scaler.dynamic_growth_steps = policy.growth_interval
        if not (self._run.scales or self._backend.shares_scale):
            scaler.dynamic_growth_steps = _NEVER

    def _build(self, original: Method, scaler: Any, variables: Any) -> None:
        original(scaler, variables)
        if self._run.scales and self._backend.shares_scale:
            object.__setattr__(scaler, "dynamic_scale", self._run.scale)

    def _compile(self, original: Method, model: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(model, *args, **kwargs)
        optimizer = getattr(model, "optimizer", None)
        if self._run.scales and optimizer is not None and not isinstance(optimizer, self._scaler):
            model.optimizer = self._scaler(optimizer, name="loss_scale_optimizer")
        return result

    # --- a step ----------------------------------------------------------------------------------------------------------------

    def _scale_loss(self, original: Method, optimizer: Any, loss: Any) -> Any:
        import keras

        run, is_scaler = self._run, isinstance(optimizer, self._scaler)
        is_ours = run.scales or (is_scaler and run.policy is not None)
        if run.observed is not None and (run.scales or (is_scaler and run.policy is None)):
            run.observed.scaler_met(PolicyScale(run) if run.scales else ScriptScale(optimizer))
        if is_ours and self._backend.shares_scale:  # a plain optimizer's as well: it will be wrapped
            scaled, factor = (loss * keras.ops.cast(run.scale, loss.dtype), run.scale) if run.scales else (loss, None)
        else:
            scaled, factor = self._backend.scaled_loss(original, optimizer, loss)
        if factor is not None:
            run.scaled(scaled, loss, factor)
        return scaled

    def _inner_update(self, original: Method, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        """Let a LossScaleOptimizer call its optimizer, which TensorFlow's strategies do in new threads."""
        local = self._run.local
        before, local.in_apply = local.in_apply, True
        try:
            return original(scaler, *args, **kwargs)
        finally:
            local.in_apply = before

    def _apply(self, original: Method, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        local = self._run.local
        if local.in_apply or len(grads := list(grads)) == 0:
            return original(optimizer, grads, trainable_variables)
        local.in_apply = True
        try:
            variables = None if trainable_variables is None else list(trainable_variables)
            return self._update(optimizer, grads, variables)
        finally:
            local.in_apply = False

    def _update(self, optimizer: Any, grads: list[Any], variables: list[Any] | None) -> Any:
        run, backend = self._run, self._backend
        self._layers.check_patterns()
        is_scaled = backend.is_scaled(optimizer, grads) or not run.scales
        run.updating()
        if run.scales and not isinstance(optimizer, self._scaler):
            optimizer = self._wrapper_of(optimizer)
        inner = optimizer.inner_optimizer if isinstance(optimizer, self._scaler) else optimizer
        passes_through = inner is not optimizer and run.policy is not None and not run.scales
        if inner is not optimizer and not optimizer.built:
            backend.create(functools.partial(_build, optimizer, variables))
        scaler = None if inner is optimizer or passes_through else optimizer
        norm = backend.norm(grads, scale=_included(scaler, inner, is_scaled=is_scaled))
        if scaler is not None and not is_scaled:
            grads = [None if g is None else times(g, scaler.dynamic_scale) for g in grads]
        trained = variables or inner._trainable_variables
        before = backend.read(inner._iterations)
        apply = (inner if passes_through else optimizer).apply
        if run.observed is not None:
            apply = functools.partial(run.observed.make_update, apply, inner, norm=norm)
        result = apply(grads, variables)
        if scaler is not None and run.policy is not None:
            self._bound(run.policy, scaler.dynamic_scale)
        backend.updated(
            norm=norm,
            scale=None if scaler is None else backend.read(scaler.dynamic_scale),
            before=before,
            after=backend.read(inner._iterations),
            accumulates=getattr(inner, "gradient_accumulation_steps", None) or 1,
            owner=run.owner(trained),
        )
        pairs = [(v, g) for v, g in zip(trained, grads, strict=False) if g is not None]
        run.record_bytes(optimizer, trained, sum(self._bytes_of(g, variable=v) for v, g in pairs))
        return result

    def _bytes_of(self, gradient: Any, *, variable: Any) -> int:
        """Return the bytes of a gradient: of a sparse one of TensorFlow, its rows, or the whole table if their number is open."""
        if is_sparse(gradient):
            rows, indices = gradient.values, gradient.indices
            if rows.shape.is_fully_defined():
                return num_bytes(rows.shape, rows.dtype) + num_bytes(indices.shape, indices.dtype)
            why = "how many rows of an embedding a batch uses is not known when a step is traced: the whole table is counted"
            self._run.note_left_alone("gradients' bytes", "an upper bound", why)
        return num_bytes(variable.shape, gradient.dtype)

    def _bound(self, policy: Policy, scale: Any) -> None:
        """Keep a static scale constant, and a dynamic one at most at its ceiling."""
        import keras

        static = policy.loss_scale == "static"
        scale.assign(policy.init_scale if static else keras.ops.minimum(scale, policy.max_scale))

    def _wrapper_of(self, optimizer: Any) -> Any:
        if id(optimizer) not in self._wrapped:
            self._backend.create(functools.partial(self._wrap, optimizer))
        return self._wrapped[id(optimizer)]

    def _wrap(self, optimizer: Any) -> None:
        if id(optimizer) in self._wrapped:  # by another replica
            return
        wrapper = self._scaler(optimizer)
        if optimizer.built:  # before its first update, by the script or by a tf.function's first trace
            _build(wrapper, optimizer._trainable_variables)
        self._wrapped[id(optimizer)] = wrapper


def _build(optimizer: Any, variables: Any) -> None:
    if not optimizer.built:
        optimizer.build(variables)
        optimizer.built = True


def _included(scaler: Any, inner: Any, *, is_scaled: bool) -> Any:
    """Return the factor by which an update's gradients are too large for its inner optimizer; None if there is none."""
    if scaler is None:
        return getattr(inner, "loss_scale_factor", None)
    return scaler.dynamic_scale if is_scaled else None


def is_sparse(gradient: Any) -> bool:
    """Return whether a gradient is one of TensorFlow's sparse ones: rows with their indices."""
    return hasattr(gradient, "indices") and hasattr(gradient, "dense_shape")


def times(gradient: Any, factor: Any) -> Any:
    """Return a gradient times a factor; of TensorFlow's sparse gradients, the values are multiplied."""
    if is_sparse(gradient):
        return type(gradient)(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def num_bytes(shape: Sequence[int], dtype: Any) -> int:
    """Return the bytes of a tensor; ``dtype`` is a backend's dtype or the name of one."""
    import keras

    return math.prod(map(int, shape)) * STORED_BYTES.get(keras.backend.standardize_dtype(dtype), 4)


_BACKOFF = 0.5  # LossScaleOptimizer's own


class LayerScale(Protocol):
    """A loss scale: the policy's, or the script's own LossScaleOptimizer's."""

    dynamic: bool
    """Whether it changes by itself."""
    key: int
    """The id of the run or of the optimizer that has the scale."""

    def get_scale(self) -> float:
        """Return the scale."""

    def get_growth_interval(self) -> int:
        """Return the number of consecutive good updates after which the scale grows."""

    def state_dict(self) -> dict[str, Any]:
        """Return the scale."""
        return {"scale": self.get_scale()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the scale."""

    def back_off(self) -> None:
        """Halve the scale after an overflow, as the optimizer does; a static one stays."""
        if self.dynamic:
            self.load_state_dict({"scale": self.get_scale() * _BACKOFF})


class PolicyScale(LayerScale):
    """The scale of a run's policy."""

    def __init__(self, run: KerasRun) -> None:
        assert run.policy is not None
        self._run, self._policy = run, run.policy
        self.dynamic, self.key = run.policy.loss_scale == "dynamic", id(run)

    def get_scale(self) -> float:
        """Return the scale."""
        return _value(self._run.scale)

    def get_growth_interval(self) -> int:
        """Return the policy's growth interval."""
        return self._policy.growth_interval

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the scale."""
        self._run.scale.assign(state["scale"])


class ScriptScale(LayerScale):
    """The scale of a script's LossScaleOptimizer."""

    dynamic = True

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self.key = optimizer, id(optimizer)

    def get_scale(self) -> float:
        """Return the scale."""
        optimizer = self._optimizer
        return _value(optimizer.dynamic_scale) if optimizer.built else float(optimizer.initial_scale)

    def get_growth_interval(self) -> int:
        """Return the number of good updates after which the scale grows."""
        return int(self._optimizer.dynamic_growth_steps)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the scale."""
        self._optimizer.initial_scale = state["scale"]
        if self._optimizer.built:
            self._optimizer.dynamic_scale.assign(state["scale"])


def _value(variable: Any) -> float:
    """Return the value of a variable, which belongs to a replica under a strategy of TensorFlow."""
    import keras

    return float(keras.ops.convert_to_numpy(variable))
