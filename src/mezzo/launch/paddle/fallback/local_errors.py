"""Measure the error that every layer of a Paddle model makes on its own in a lower precision, from one step computed in FP32.

The operations of a layer's first call run once more on their FP32 operands: unchanged, and with the layer's own operations rounded if
the policy lists them. Those of its sublayers stay in FP32, so that a container's error comes only from what it computes itself.

Limit: the first call of a layer represents all its calls. Cost: a copy of the step's tensors, and two passes per level of the layer tree.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle

from mezzo.frameworks import paddle_ops
from mezzo.launch.paddle.gradients.script_hooks import observe_gradient
from mezzo.launch.paddle.layer_names import LayerNames
from mezzo.launch.paddle.nonfinite.replay import KEPT, NONE, Twins
from mezzo.launch.paddle.operations import flops_of, is_product, operands_that_need_gradients
from mezzo.launch.paddle.surveys import array_of
from mezzo.launch.paddle.tape import TapedOperation, tensors
from mezzo.observe.fallback.evidence import LocalError, scale_alone
from mezzo.policy import Policy


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
        operations: those of the whole step.
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
        chosen = paddle_ops.precisions(paddle_ops.for_scripts(policy))
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
    """Return the norm of the difference over that of ``exact``, of all arrays together; infinite if it is not finite."""
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
