"""Keras on JAX: backward passes are ``jax.value_and_grad``, updates ``stateless_apply``, and both run in traced steps.

A traced step runs as Python only once, so a callback in it passes each step's numbers to Python. ``fit`` waits for the callback after every
call of its train function, where it would wait to read the loss; a script's own jitted step does not wait.

A step has no state of its own: an optimizer's variables, including its loss scale, go in and come out as values. So the policy's
scale is set in the ``LossScaleOptimizer`` that ``compile`` wraps around the optimizer, or that the script has, and each of them has a
scale of its own (``jax_scaling``).
"""

from __future__ import annotations

import functools
import importlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mezzo.errors import MezzoError
from mezzo.frameworks.keras import tf32_of
from mezzo.launch.keras.jax_scaling import BackwardPass, JaxScaling, scale_index
from mezzo.launch.keras.state import Backend, KerasRun, by_format
from mezzo.launch.keras.updates import times
from mezzo.launch.patches import Patches

Method = Callable[..., Any]
_OPTIMIZER = 2
"""The place of the optimizer's variables in the state of ``train_step``."""
_PRECISION = {True: "tensorfloat32", False: "float32"}
"""JAX's names for the precision of FP32 products, by whether TF32 is on."""


class JaxBackend(Backend):
    """The hooks on JAX as a backend of Keras (``launch.keras.state.Backend``)."""

    shares_scale = False

    def __init__(self, run: KerasRun) -> None:
        self._run = run
        self._scaling = JaxScaling(run)
        self._losses: list[Any] = []
        """The true losses of the update being made, which are the values of differentiated functions."""
        self._patches: Patches | None = None
        self._counting: set[type] = set()
        """The classes of models whose training step is wrapped, to count it."""
        self._error: MezzoError | None = None
        """An error of a callback, which must not raise it itself."""
        self.name = f"jax {jax.__version__}"

    def install(self, patches: Patches) -> None:
        """Patch JAX's differentiation, and Keras' stateless updates and train functions."""
        import keras

        self._patches = patches
        patches.wrap(jax, "value_and_grad", self._value_and_grad)
        patches.wrap(jax, "grad", self._grad)
        base = importlib.import_module("keras.src.optimizers.base_optimizer").BaseOptimizer
        for owner in (base, keras.optimizers.LossScaleOptimizer):
            patches.around(owner, "stateless_apply", self._stateless_apply)
        trainer = importlib.import_module("keras.src.backend.jax.trainer").JAXTrainer
        patches.around(trainer, "make_train_function", self._make_train_function)
        on = None if self._run.policy is None else tf32_of(self._run.policy)
        if on is not None:
            before = jax.config.jax_default_matmul_precision
            patches.on_undo(lambda: jax.config.update("jax_default_matmul_precision", before))
            jax.config.update("jax_default_matmul_precision", _PRECISION[on])

    def norm(self, gradients: Sequence[Any], *, scale: Any) -> Any:
        """Return the norm of all gradients together."""
        known = [jnp.sum(jnp.square(jnp.asarray(g, jnp.float32))) for g in gradients if g is not None]
        total = jnp.sqrt(sum(known, start=jnp.float32(0)))
        return total if scale is None else total / jnp.asarray(getattr(scale, "value", scale))

    def read(self, variable: Any) -> Any:
        """Return a variable's value."""
        return variable.value

    def updated(self, *, norm: Any, scale: Any, before: Any, after: Any, accumulates: int, owner: int) -> None:
        """Record an update, in the step being traced or immediately."""
        loss, self._losses = _sum(self._losses), []
        close = functools.partial(self._close, accumulates=accumulates, owner=owner)
        shown = math.nan if scale is None else scale
        jax.debug.callback(close, loss, norm, shown, before, after, ordered=jax.device_count() == 1)

    def collect(self) -> None:
        """Wait for the callbacks of all steps made until now.

        Raises:
            ScaleFloorError: one of these steps reached the scale's floor.
        """
        jax.effects_barrier()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def finish(self) -> None:
        """Wait for the last callbacks."""
        jax.effects_barrier()

    def device_type(self) -> str:
        """Return the type of JAX's default device."""
        return "cuda" if jax.default_backend() in ("gpu", "cuda") else "cpu"

    # --- what a step does --------------------------------------------------------------------------------------------------------

    def scaled_loss(self, original: Method, optimizer: Any, loss: Any) -> tuple[Any, Any]:
        """Return what ``scale_loss`` makes of a loss, and the factor."""
        return self._scaling.scaled_loss(original, optimizer, loss)

    def is_scaled(self, optimizer: Any, gradients: Sequence[Any]) -> bool:
        """Return whether the gradients of an update include the loss scale, and keep the losses that they are of."""
        passes = self._scaling.used(gradients)
        is_scaled = self._scaling.is_scaled(optimizer, passes)
        self._keep_losses(passes, getattr(optimizer, "dynamic_scale", optimizer.loss_scale_factor))
        return is_scaled

    def _keep_losses(self, passes: Sequence[BackwardPass], scale: Any) -> None:
        """Keep the true losses of backward passes; ``scale`` is in those that the script scaled."""
        scale = getattr(scale, "value", scale)
        fresh = self._scaling.consume(passes)
        self._losses = [p.value / scale if p.by_script and scale is not None else p.value for p in fresh]

    def _value_and_grad(self, original: Method) -> Method:
        @functools.wraps(original)
        def value_and_grad(function: Any, argnums: Any = 0, has_aux: bool = False, **settings: Any) -> Method:
            call = self._scaling.differentiate(original, function, argnums, has_aux=has_aux, settings=settings)
            return functools.wraps(function)(call)

        return value_and_grad

    def _grad(self, original: Method) -> Method:
        @functools.wraps(original)
        def grad(function: Any, argnums: Any = 0, has_aux: bool = False, **settings: Any) -> Method:
            differentiated = jax.value_and_grad(function, argnums, has_aux, **settings)

            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                value, gradients = differentiated(*args, **kwargs)
                return (gradients, value[1]) if has_aux else gradients

            return call

        return grad

    def _stateless_apply(
        self, original: Method, optimizer: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        run = self._run
        if run.local.in_apply:
            return original(optimizer, optimizer_variables, grads, trainable_variables)
        run.local.in_apply = True
        try:
            return self._update(original, optimizer, optimizer_variables, list(grads), trainable_variables)
        finally:
            run.local.in_apply = False

    def _update(self, original: Method, optimizer: Any, values: Any, grads: list[Any], trained: Any) -> Any:
        """Make an update; ``values`` are those of the optimizer's variables, in their order."""
        run = self._run
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        count_at = next(k for k, variable in enumerate(optimizer.variables) if variable is inner._iterations)
        scale_at = None if inner is optimizer else scale_index(optimizer)
        scale = optimizer.loss_scale_factor if scale_at is None else values[scale_at]
        passes = self._scaling.used(grads)
        is_scaled = self._scaling.is_scaled(optimizer, passes)
        self._keep_losses(passes, scale)
        norm = self.norm(grads, scale=scale if is_scaled else None)
        if not is_scaled:
            grads = [None if g is None else times(g, jnp.asarray(scale, g.dtype)) for g in grads]
        updated, after = original(optimizer, values, grads, trained)
        if scale_at is not None and run.policy is not None:
            after = list(after)
            after[scale_at] = self._bounded(after[scale_at])
        recorded_at = scale_at if run.policy is None or run.scales else None
        self.updated(
            norm=norm,
            scale=None if recorded_at is None else after[recorded_at],
            before=values[count_at],
            after=after[count_at],
            accumulates=getattr(inner, "gradient_accumulation_steps", None) or 1,
            owner=run.owner(inner._trainable_variables),
        )
        run.record_bytes(
            optimizer, inner._trainable_variables, sum(g.size * g.dtype.itemsize for g in grads if g is not None)
        )
        return updated, after

    def _bounded(self, scale: Any) -> Any:
        """Return the scale after an update: constant if it is static or there is none, at most its ceiling if it is dynamic."""
        policy = self._run.policy
        assert policy is not None
        if policy.loss_scale == "dynamic":
            return jnp.minimum(scale, policy.max_scale)
        return jnp.full_like(scale, policy.init_scale if policy.loss_scale == "static" else 1.0)

    def _close(
        self, loss: Any, norm: Any, scale: Any, before: Any, after: Any, *, accumulates: int, owner: int
    ) -> None:
        """Close a step, unless its gradients are still accumulating; runs in a thread of JAX, where it must not raise."""
        skipped = int(after) == int(before)
        if int(after) % accumulates and not skipped:
            return
        row = {"losses": [float(loss)], "norms": [float(norm)], "scales": [float(scale)]}
        try:
            self._run.close(**row, skips=[skipped], owners=[owner])
        except MezzoError as error:
            self._error = self._error or error

    # --- fit -----------------------------------------------------------------------------------------------------------------------

    def _make_train_function(self, original: Method, model: Any, force: bool = False) -> None:
        before = model.train_function
        self._count_steps_of(type(model))
        original(model, force)
        if model.train_function is not before:
            model.train_function = self._waiting(model.train_function)

    def _waiting(self, train: Method) -> Method:
        @functools.wraps(train)
        def step(*args: Any, **kwargs: Any) -> Any:
            result = train(*args, **kwargs)
            self.collect()
            return result

        return step

    def _count_steps_of(self, kind: type) -> None:
        owner = next(base for base in kind.__mro__ if "train_step" in vars(base))
        if self._patches is not None and owner not in self._counting:
            self._counting.add(owner)
            self._patches.around(owner, "train_step", self._counted)

    def _counted(self, original: Method, model: Any, state: Any, data: Any) -> Any:
        if not self._run.flops:
            self._count(functools.partial(self._step, original, model), state, data)
        return self._step(original, model, state, data)

    def _step(self, original: Method, model: Any, state: Any, data: Any) -> Any:
        with self._scaling.step(model.optimizer, state[_OPTIMIZER]):
            return original(model, state, data)

    def _count(self, step: Method, state: Any, data: Any) -> None:
        """Trace a step once more, and count its products."""
        run = self._run
        try:
            by_dtype = count(jax.make_jaxpr(step)(state, data).jaxpr)
        except MezzoError:
            raise
        except Exception as error:  # a step that cannot be traced twice must not end the script's training
            why = f"the step cannot be traced a second time: {type(error).__name__}: {error}".splitlines()[0]
            run.note_left_alone("operations counted", "none", why)
            return
        finally:
            self._losses = []
        tf32 = self.device_type() == "cuda" and jax.config.jax_default_matmul_precision != _PRECISION[False]
        run.flops = by_format(by_dtype, tf32=tf32)
        run.counted_on_step = 1 if run.flops else None


def _sum(losses: Sequence[Any]) -> Any:
    """Return the sum of a step's losses; NaN if there is none, or if one belongs to a function that was traced separately."""
    if not losses:
        return math.nan
    try:
        return sum(jnp.sum(jnp.asarray(loss, jnp.float32)) for loss in losses)
    except jax.errors.UnexpectedTracerError:
        return math.nan


# --- Count the products in a traced step of JAX, from its jaxpr: forward, backward, and in called functions ---------------------

# As in ``measure.flops``, a product counts as two operations. Both sides of a branch are counted, a scan's body as often as it runs, and
# a loop of unknown length once. Keras' order of dimensions distinguishes a convolution from its gradients.


def count(jaxpr: Any) -> Counter[str]:
    """Return the FLOPs of the products in a jaxpr, by the name of the operands' dtype."""
    total: Counter[str] = Counter()
    for equation in jaxpr.eqns:
        flops_of = _PRODUCTS.get(equation.primitive.name)
        if flops_of is not None:
            total[str(equation.invars[0].aval.dtype)] += flops_of(equation)
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        for inner in _called(equation):
            for dtype, flops in count(inner).items():
                total[dtype] += times * flops
    return total


def _called(equation: Any) -> Iterator[Any]:
    """Yield the jaxprs that an equation runs."""
    for value in equation.params.values():
        for candidate in value if isinstance(value, (tuple, list)) else (value,):
            jaxpr = getattr(candidate, "jaxpr", candidate)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def _dot(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    flops: int = 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[k] for k in contracted)
    return flops


def _convolution(equation: Any) -> int:
    """Count a convolution of Keras, or one of its gradients, which JAX writes as convolutions with dimensions swapped."""
    (x, kernel), (y,), numbers = equation.invars, equation.outvars, equation.params["dimension_numbers"]
    batch, features, *spatial_dims = numbers.lhs_spec
    if batch != 0:  # the gradient of the kernel: summed over the batch and the positions of the output's gradient
        positions = x.aval.shape[features] * math.prod(kernel.aval.shape[k] for k in numbers.rhs_spec[2:])
        return int(2 * positions * math.prod(y.aval.shape))
    of_input = numbers.rhs_spec[0] < numbers.rhs_spec[1]  # or a transposed convolution
    spatial = [x.aval.shape[k] for k in spatial_dims] if of_input else [y.aval.shape[k] for k in numbers.out_spec[2:]]
    return int(2 * x.aval.shape[batch] * math.prod(spatial) * math.prod(kernel.aval.shape))


_PRODUCTS = {"dot_general": _dot, "conv_general_dilated": _convolution}
"""The FLOP formula of each primitive that is a product."""
