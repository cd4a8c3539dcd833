"""Keras on JAX: backward passes are ``jax.value_and_grad``, updates ``stateless_apply``, and both run in traced steps.

A traced step runs as Python only once, so a callback in it passes each step's numbers to Python. ``fit`` waits for the callback after every
call of its train function, where it would wait to read the loss; a script's own jitted step does not wait.

A step has no state of its own: an optimizer's variables, including its loss scale, go in and come out as values. So the policy's
scale is set in the ``LossScaleOptimizer`` that ``compile`` wraps around the optimizer, or that the script has, and each of them has a
scale of its own.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import keras

from mezzo.errors import MezzoError, ScriptError
from mezzo.frameworks.keras import tf32_of
from mezzo.launch.keras.jaxpr_tape import is_product, measured, step_graph
from mezzo.launch.keras.state import Backend, CountedStep, KerasRun, by_format, mixed_scaling
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
        if self._run.tape is not None:
            self._run.tape.refuse(
                "its training loop is its own, and on JAX the operations of fit alone are seen: use fit or train_step"
            )
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
        """Return the norm of all gradients together; NaN where the step's operations are recorded for a prediction."""
        if self._run.tape is not None:
            return jnp.float32(math.nan)
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

    def _keep_losses(self, passes: Sequence[DifferentiatedCall], scale: Any) -> None:
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
        """Make an update; ``values`` belong to the optimizer's variables, in their order."""
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
        if not self.counted.flops:
            step = functools.partial(self._step, original, model)
            self._count(step, state, data) if self._run.tape is None else self._record(step, state, data)
        return self._step(original, model, state, data)

    def _step(self, original: Method, model: Any, state: Any, data: Any) -> Any:
        with self._scaling.step(model.optimizer, state[_OPTIMIZER]):
            return original(model, state, data)

    def _record(self, step: Method, state: Any, data: Any) -> None:
        """Record the operations of a step for a prediction."""
        self.counted = CountedStep({"recorded": 1})
        batch = next((int(leaf.shape[0]) for leaf in jax.tree.leaves(data) if leaf.ndim), None)

        def graph_at(size: int | None) -> Any:
            try:
                return step_graph(jax.make_jaxpr(step)(state, _with_batch(data, batch, size)), self._run.tape)
            finally:
                self._losses = []

        self._run.tape.record(graph_at, batch=batch, optimizer=lambda: self._run.optimizer_name)

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
        flops = by_format(by_dtype, tf32=tf32)
        self.counted = CountedStep(flops, 1 if flops else None)


def _with_batch(data: Any, batch: int | None, size: int | None) -> Any:
    """Return the shapes of a step's data with another batch."""

    def resized(leaf: Any) -> Any:
        first = (size,) if leaf.ndim and leaf.shape[0] == batch else leaf.shape[:1]
        return jax.ShapeDtypeStruct((*first, *leaf.shape[1:]), leaf.dtype)

    return data if size == batch else jax.tree.map(resized, data)


def _sum(losses: Sequence[Any]) -> Any:
    """Return the sum of a step's losses; NaN if there is none, or if one belongs to a function that was traced separately."""
    if not losses:
        return math.nan
    try:
        return sum(jnp.sum(jnp.asarray(loss, jnp.float32)) for loss in losses)
    except jax.errors.UnexpectedTracerError:
        return math.nan


# As in ``measure.flops``, a product counts as two operations. Both sides of a branch are counted, a scan's body as often as it runs, and
# a loop of unknown length once. Keras' order of dimensions distinguishes a convolution from its gradients.


def count(jaxpr: Any) -> Counter[str]:
    """Return the FLOPs of the products in a jaxpr, by the name of the operands' dtype."""
    total: Counter[str] = Counter()
    for equation in jaxpr.eqns:
        if is_product(equation):
            _, _, flops = measured(equation)
            total[str(equation.invars[0].aval.dtype)] += flops
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


# The loss scale is a variable of the ``LossScaleOptimizer``, which enters a step as a value. In ``fit`` Mezzo finds that value in
# the state of ``train_step``. A loss that the script does not pass to ``scale_loss`` is multiplied by it in the differentiated
# function, and its gradients are divided at once, so that the script's own clipping sees true gradients; before they reach the
# optimizer, which divides them, they are multiplied again, exact for powers of two. A loop of the script's own keeps the value to
# itself: there the script must scale.

_NUM_PASSES = 16
"""Number of backward passes that are remembered: enough for one training step of several models."""
_SCOPE = "with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, optimizer_variables))): loss = optimizer.scale_loss(loss)"
_HINT = (
    "wrap the optimizer in keras.optimizers.LossScaleOptimizer and scale the loss in the differentiated function, as Keras' own "
    f"train_step does: {_SCOPE}; --policy fp16:loss_scale=none trains without a loss scale, --policy bf16 needs none"
)


@dataclass(kw_only=True)
class DifferentiatedCall:
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
        self._passes: list[DifferentiatedCall] = []
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
        """Run a ``train_step`` inside; ``values`` belong to the optimizer's variables."""
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
            self._passes.append(
                DifferentiatedCall(value=value, by_script=by_script, gradients=jax.tree.leaves(gradients))
            )
            self._run.has_backward = True
            return ((value, aux) if has_aux else value), gradients

        return call

    def _is_by_script(self, function: Any, num_before: int) -> bool:
        code = _code(function)
        if self._run.num_scaled > num_before:
            self._scaling.add(code)
        return code in self._scaling

    # --- updates -----------------------------------------------------------------------------------------------------------------

    def used(self, gradients: Sequence[Any]) -> list[DifferentiatedCall]:
        """Return the backward passes that gave these gradients, as far as can be told: by identity, or by their shapes."""
        known = {id(g) for g in gradients if g is not None}
        shapes = _shapes(gradients)
        return (
            [p for p in self._passes if any(id(g) in known for g in p.gradients)]
            or [p for p in self._passes if p.shapes == shapes]
            or list(self._passes)
        )

    def consume(self, passes: Sequence[DifferentiatedCall]) -> list[DifferentiatedCall]:
        """Return the passes that no update has used, and record that one has."""
        fresh = [p for p in passes if not p.is_used]
        for backward in passes:
            backward.is_used, backward.gradients = True, []
        return fresh

    def is_scaled(self, optimizer: Any, passes: Sequence[DifferentiatedCall]) -> bool:
        """Return whether gradients include the optimizer's scale.

        Raises:
            ScriptError: the policy scales losses, and nothing has scaled theirs, or only some.
        """
        if not self._run.scales:
            return True
        if not hasattr(optimizer, "initial_scale"):
            raise ScriptError(
                f"a {type(optimizer).__name__} gets gradients of an unscaled loss: on JAX, mezzo run scales only for the optimizer of "
                "compile; allowed under a policy with a loss scale: a LossScaleOptimizer",
                hint=_HINT,
            )
        kinds = {p.by_script for p in passes}
        if len(kinds) > 1:
            raise mixed_scaling()
        if kinds == {True} or (not kinds and self._run.num_scaled):
            return True
        if optimizer is not self._optimizer or not kinds:
            raise ScriptError(
                "a LossScaleOptimizer gets gradients of an unscaled loss; allowed on JAX: a loss from its scale_loss, or a jax.grad "
                "or jax.value_and_grad in the train_step of fit",
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
