"""Compare the gradients of a Paddle script's first steps between precisions: one run of a fallback search.

Optimizers leave the weights as they are, so that all steps use the script's initial weights: step k is then the same computation in
every run, on batch k. It compares the parameters' gradients before a step's first update: unscaled, and before
any clipping.

PyTorch's search has the same four kinds of runs (``mezzo.observe.fallback.observer``): the ``reference`` in FP32, which also measures
every layer on its own; ``noise`` and ``rounding``, in FP32 with every layer's output moved by one unit in the last place, of FP32 and of
the policy's format; and ``check``, in lower precision.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from mezzo.formats import FP32
from mezzo.frameworks import paddle as paddle_policy
from mezzo.launch.paddle.backward import observe_gradient
from mezzo.launch.paddle.operations import flops_of, is_product, operands_that_need_gradients
from mezzo.launch.paddle.replay import KEPT, NONE, Twins
from mezzo.launch.paddle.state import LayerNames, PaddleRun, dense, mapped
from mezzo.launch.paddle.surveys import array_of, is_fp32
from mezzo.launch.paddle.tape import Listener, StepObserver, Tape, TapedOperation, tensors
from mezzo.launch.patches import Patches
from mezzo.observe.fallback.evidence import LocalError, Measurements, scale_alone
from mezzo.observe.settings import FallbackSettings
from mezzo.policy import Policy
from mezzo.records import RunRecord

# The operations of a layer's first call run once more on their FP32 operands: unchanged, and with the layer's own operations rounded if
# the policy lists them. Its sublayers' operations stay in FP32, so that a container's error comes only from what it computes itself.
#
# Limit: the first call of a layer represents all its calls. Cost: a copy of the step's tensors, and two passes per level of the layer tree.


@dataclass(eq=False)
class FirstCall:
    """The first call of a layer."""

    layer: Any
    first: int
    """Number of operations on the tape before it."""
    last: int = 0
    outputs: list[Any] = field(default_factory=list)
    gradients: list[Any] = field(default_factory=list)
    """One per output; None if none has arrived."""

    def returned(self, output: Any, last: int) -> None:
        """Keep the outputs, and hook them to keep their gradients."""
        self.last = last
        self.outputs = [t for t in tensors([output]) if not t.stop_gradient and t.is_floating_point()]
        self.gradients = [None] * len(self.outputs)
        for index, tensor in enumerate(self.outputs):
            observe_gradient(tensor, functools.partial(self._gradient_arrived, index))

    def _gradient_arrived(self, index: int, gradient: Any) -> None:
        if self.gradients[index] is None and gradient is not None:
            self.gradients[index] = gradient.detach().clone()


@dataclass(frozen=True)
class Grads:
    """Outputs and gradients of one run of a layer, as arrays."""

    output: list[Any]
    dgrad: list[Any]
    wgrad: list[Any]


def measured(
    calls: Sequence[FirstCall], operations: Sequence[TapedOperation], names: LayerNames, policy: Policy
) -> list[LocalError]:
    """Return the errors of the layers of ``calls`` under ``policy``.

    Args:
        calls: each with its outputs and gradients.
        operations: all of the step's.
        names: the layers' names; a whole model has no name that a pattern could match.
        policy: the policy to judge.
    """
    largest = (_largest(g for g in call.gradients if g is not None) for call in calls)
    bench = _Bench(operations, policy, scale_alone(policy, largest))
    return [bench.local(call, names.pattern(call.layer)) for call in calls]


class _Bench:
    """Runs layers on their own."""

    def __init__(self, operations: Sequence[TapedOperation], policy: Policy, scale: float) -> None:
        self._operations, self._policy, self._scale = operations, policy, scale
        chosen = paddle_policy.precisions(paddle_policy.for_scripts(policy))
        self._lower = {op for op, precision in chosen.items() if precision == "lower"}

    def local(self, call: FirstCall, pattern: str) -> LocalError:
        """Return the error of one layer; ``pattern`` is its name, empty for a whole model."""
        kind = type(call.layer).__name__
        name: dict[str, Any] = {"module": pattern or kind, "type": kind, "unnamed": not pattern}
        try:
            exact, low = self._run(call, low=False), self._run(call, low=True)
        except Exception as error:  # a layer of the script may fail on its own for any reason
            return LocalError(**name, reason=f"{type(error).__name__}: {error}".splitlines()[0])
        pairs = [(exact.output, low.output), (exact.dgrad, low.dgrad), (exact.wgrad, low.wgrad)]
        output, dgrad, wgrad = (relative_error(a, b) if a else None for a, b in pairs)
        arrived = [array_of(g) for g in call.gradients if g is not None]
        maxima = [float(np.abs(a).max()) for a in (*arrived, *exact.dgrad, *exact.wgrad) if a.size]
        return LocalError(
            **name,
            output=output,
            dgrad=dgrad,
            wgrad=wgrad,
            flops=sum(map(_flops, self._operations[call.first : call.last])),
            largest=max(maxima, default=0.0),
        )

    def _run(self, call: FirstCall, *, low: bool) -> Grads:
        operations = self._operations[call.first : call.last]
        computed = {id(t) for operation in operations for t in operation.results}
        weights = [p for p in call.layer.parameters() if not p.stop_gradient]
        inside = {id(p) for p in weights} | computed
        outside = {id(t): t for operation in operations for t in operation.operands if id(t) not in inside}
        inputs = [t for t in outside.values() if not t.stop_gradient and t.is_floating_point()]
        twins = Twins(
            [*weights, *inputs], self._policy.storage, KEPT if low else NONE, rounds=self._rounds(call.layer, low=low)
        )
        before = paddle.get_rng_state()
        try:
            for operation in operations:
                twins.run(operation)
            return self._grads(call, twins, weights, inputs, scale=self._scale if low else 1.0)
        finally:
            paddle.set_rng_state(before)

    def _grads(self, call: FirstCall, twins: Twins, weights: list[Any], inputs: list[Any], *, scale: float) -> Grads:
        outputs = [twins.of(t) for t in call.outputs]
        pairs = [(o, g * scale) for o, g in zip(outputs, call.gradients, strict=True) if g is not None]
        leaves = [twins.of(t) for t in (*inputs, *weights)]
        roots, starts = [o for o, _ in pairs], [g for _, g in pairs]
        found = paddle.grad(roots, leaves, starts, allow_unused=True) if leaves else []
        arrays = [None if g is None else array_of(g) / scale for g in found]
        dgrad = [a for a in arrays[: len(inputs)] if a is not None]
        return Grads([array_of(o) for o in outputs], dgrad, [a for a in arrays[len(inputs) :] if a is not None])

    def _rounds(self, layer: Any, *, low: bool) -> Callable[[TapedOperation], bool]:
        return lambda operation: low and operation.layer is layer and operation.name in self._lower


def relative_error(exact: Sequence[Any], other: Sequence[Any]) -> float:
    """Return the norm of the difference over the norm of ``exact``, of all arrays together; infinite if it is not finite."""
    difference = math.hypot(*(float(np.linalg.norm((a - b).ravel())) for a, b in zip(exact, other, strict=True)))
    norm = math.hypot(*(float(np.linalg.norm(a.ravel())) for a in exact))
    if not math.isfinite(difference):
        return math.inf
    return difference / norm if norm else 0.0


def _flops(operation: TapedOperation) -> int:
    if not is_product(operation.name) or not operation.results:
        return 0
    args, kwargs = operation.args, operation.kwargs
    needed = len(operands_that_need_gradients(operation.name, args, kwargs))
    return flops_of(operation.name, operation.result, args, kwargs) * (1 + needed)


def _largest(gradients: Iterable[Any]) -> float:
    return max((float(np.abs(array_of(g)).max()) for g in gradients if g.size), default=0.0)


# --- Observe the first steps ------------------------------------------------------------------------------------------------------

REFERENCE_GRADIENTS = "reference.npz"
"""Name of the file with the reference's gradients, by step and parameter."""


class Fallback(StepObserver, Listener):
    """An observer of the first steps' gradients; while it observes, weights stay as they are."""

    kind = "fallback"

    def __init__(self, settings: FallbackSettings, run: PaddleRun) -> None:
        super().__init__(run, steps=settings.steps)
        self._settings = settings
        run.withhold_updates()
        self._tape = Tape(run, self)
        self._calls: dict[int, FirstCall] = {}
        self._gradients: dict[str, Any] = {}
        self._reference: dict[int, dict[str, Any]] = defaultdict(dict)
        self._measured = Measurements(settings, norm=_norm, distance=_distance)
        self._of_step: dict[str, Any] = {}
        """The gradients of the open step, by parameter."""
        # Its own, so the script's random numbers stay the same.
        self._generator = np.random.Generator(np.random.PCG64(0))
        if settings.role != "reference":
            with np.load(Path(settings.folder) / REFERENCE_GRADIENTS) as saved:
                for key, gradient in saved.items():
                    number, _, name = key.partition(" ")
                    self._reference[int(number)][name] = gradient

    def install(self, patches: Patches) -> None:
        """Wrap layers, and record operations, until ``patches`` are undone."""
        self._tape.install(patches)
        patches.around(paddle.nn.Layer, "__call__", self._call)

    def begin(self) -> None:
        """Record the first step of the reference, to measure layers."""
        if self._settings.role == "reference" and not self._measured.steps:
            self._tape.start()

    def end(self) -> None:
        """Stop recording."""
        self._tape.stop()
        self._tape.clear()
        self._calls = {}

    def judge(self, norm: Any | None) -> None:
        """Keep the gradients of all parameters, and measure every layer of the first step on its own."""
        names = LayerNames(self._tape.roots)
        parameters = [p for root in names.outermost for p in root.parameters() if not p.stop_gradient]
        with self.run.own_work(), self._tape.paused():
            self._of_step = {names.parameter(p): array_of(dense(p.grad)) for p in parameters if p.grad is not None}
            if self._settings.role == "reference" and not self._measured.steps:
                calls = [call for call in self._calls.values() if any(g is not None for g in call.gradients)]
                self._measured.local.extend(measured(calls, self._tape.operations, names, self._settings.policy))

    def decide(self, step: int, *, loss_finite: bool, gradients_finite: bool, skipped: bool) -> None:
        """Compare the step's gradients with the reference's; end the script if no more steps are needed."""
        gradients, self._of_step = self._of_step, {}
        if self._settings.role == "reference":
            self._gradients |= {f"{step} {name}": gradient for name, gradient in gradients.items()}
            self._measured.add_reference(step, {name: bool(np.isfinite(g).all()) for name, g in gradients.items()})
        else:
            self._measured.add(step, gradients, self._reference[step])
        if self._measured.enough:
            self._waiting = []

    def closure_met(self, optimizer: str) -> None:
        """Record that the gradients cannot be compared."""
        self._measured.closure_met(optimizer)

    # --- layers --------------------------------------------------------------------------------------------------------------------------

    def _call(self, original: Callable[..., Any], layer: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self._settings.role in ("noise", "rounding") and paddle.is_grad_enabled():
            return mapped(original(layer, *args, **kwargs), self._moved)
        if not self._tape.on or id(layer) in self._calls or not paddle.is_grad_enabled():
            return original(layer, *args, **kwargs)
        call = self._calls[id(layer)] = FirstCall(layer, len(self._tape.operations))
        output = original(layer, *args, **kwargs)
        call.returned(output, len(self._tape.operations))
        return output

    def _moved(self, tensor: Any) -> Any:
        """Return an FP32 tensor with every element moved by about one unit in its last place; others unchanged.

        Values do not cross 1 and -1; in a coarser format, what it can represent stays as it is.
        """
        if not is_fp32(tensor):
            return tensor
        coarse = self._settings.role == "rounding"
        eps = self._settings.policy.required_formats[0].eps if coarse else FP32.eps
        signs = self._generator.integers(0, 2, tensor.shape) * 2.0 - 1.0
        with self.run.own_work():
            # Probabilities and cosines stay in their range.
            size = np.abs(tensor.numpy())
            signs = np.where((size <= 1.0) & (size * (1.0 + eps) > 1.0), -1.0, signs)
            if coarse:
                digits = np.frexp(size)[0] * (2.0 / eps)
                signs = np.where(digits == np.round(digits), 0.0, signs)
            return tensor * paddle.to_tensor((1.0 + eps * signs).astype(np.float32), place=tensor.place)

    # --- the measurements ----------------------------------------------------------------------------------------------------------------

    def too_short(self) -> bool:
        """Return whether no gradient was compared."""
        return not self._measured.steps

    def record(self, run: RunRecord) -> RunRecord:
        """Write the measurements to the folder; return the run's own record."""
        if self._settings.role == "reference":
            np.savez(Path(self._settings.folder) / REFERENCE_GRADIENTS, **self._gradients)
        self._measured.write()
        return run


def _norm(gradient: Any) -> float:
    return float(np.linalg.norm(gradient.astype(np.float64)))


def _distance(found: Any, exact: Any) -> float:
    return _norm(found.astype(np.float64) - exact)
