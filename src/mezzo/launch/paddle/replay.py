"""Compute the gradients of a recorded Paddle step again, with a format that has no largest or no smallest number.

A value that leaves a format's range becomes infinite or zero, and whether that matters shows only in the gradients: the softmax of
-inf is the same as with -1e9. So the recorded operations run once more, on the same operands and random numbers, and every rounding
keeps the format's digits but not its limits. If gradients differ from a replay with the limits, the range made them wrong,
because nothing else differs. A replay is discarded if its loss is not the step's.

Limits: a script's own ``PyLayer``, and activation checkpointing, are constants in both replays, so errors that arise before
them are not found. Cost: two or three more forward and backward passes, in observed steps in which a value left the format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import paddle
from paddle.autograd import PyLayer

from mezzo.formats import FP32, Format
from mezzo.launch.paddle.state import mapped
from mezzo.launch.paddle.surveys import array_of, is_fp32
from mezzo.launch.paddle.tape import TapedOperation, tensors

_SAME = 1e-4
"""Relative difference up to which a replayed loss counts as the step's: sums may be computed in another order."""


class Limits(NamedTuple):
    """Which ends of a format's range are kept."""

    above: bool
    below: bool


KEPT, NO_UPPER, NONE = Limits(True, True), Limits(False, True), Limits(False, False)


class NotRepeated(Exception):
    """The step cannot be computed again."""


@dataclass(frozen=True)
class ReplayedPass:
    """One backward pass of a step."""

    losses: list[Any]
    gradients: list[Any]
    """The gradients from which it starts; None for 1."""


def rounded_within(values: npt.NDArray[Any], fmt: Format, limits: Limits) -> npt.NDArray[np.float32]:
    """Return FP32 ``values`` with the digits of ``fmt``, to nearest, ties to even; its range ends only where ``limits`` says so."""
    with np.errstate(all="ignore"):
        wide = values.astype(np.float64)
        _, exponents = np.frexp(wide)
        units = exponents - (fmt.mantissa_bits + 1)
        if limits.below:
            units = np.maximum(units, math.frexp(fmt.min_subnormal)[1] - 1)
        result = np.ldexp(np.rint(np.ldexp(wide, -units)), units)
        if limits.above:
            result = np.where(np.abs(result) > fmt.max, np.copysign(np.inf, result), result)
        return np.where(np.isfinite(wide), result, wide).astype(np.float32)


def gradients(
    operations: Sequence[TapedOperation],
    passes: Sequence[ReplayedPass],
    weights: Sequence[Any],
    fmt: Format,
    limits: Limits,
) -> dict[int, Any]:
    """Return the gradients of ``weights`` by id, summed over all passes, as FP32 arrays.

    Raises:
        NotRepeated: an operation cannot run again, or the loss differs.
    """
    twins = Twins(weights, fmt, limits)
    before = paddle.get_rng_state()
    try:
        for operation in _needed(operations, passes):
            twins.run(operation)
        return _summed([_gradients_of_pass(of_pass, twins, weights, check=limits == KEPT) for of_pass in passes])
    except NotRepeated:
        raise
    except Exception as error:  # any operation of the script may fail when it runs again
        raise NotRepeated(f"the step cannot be computed again: {type(error).__name__}") from error
    finally:
        paddle.set_rng_state(before)


def _needed(operations: Sequence[TapedOperation], passes: Sequence[ReplayedPass]) -> list[TapedOperation]:
    """Return the operations on which the losses depend, in order."""
    needed = {id(loss) for of_pass in passes for loss in of_pass.losses}
    found = []
    for operation in reversed(operations):
        if not operation.backward and any(id(result) in needed for result in operation.results):
            found.append(operation)
            needed.update(id(t) for t in operation.operands)
    return found[::-1]


def _gradients_of_pass(of_pass: ReplayedPass, twins: Twins, weights: Sequence[Any], *, check: bool) -> dict[int, Any]:
    losses = [twins.of(loss) for loss in of_pass.losses]
    for original, replayed in zip(of_pass.losses, losses, strict=True):
        if check and not np.allclose(array_of(original), array_of(replayed), rtol=_SAME, atol=0.0, equal_nan=True):
            raise NotRepeated("the step computed again has another loss")
    starts = [paddle.ones_like(loss) if g is None else g for loss, g in zip(losses, of_pass.gradients, strict=True)]
    leaves = [twins.of(weight) for weight in weights]
    found = paddle.grad(losses, leaves, starts, retain_graph=True, allow_unused=True)
    return {id(w): array_of(g) for w, g in zip(weights, found, strict=True) if g is not None}


def _summed(parts: Sequence[dict[int, Any]]) -> dict[int, Any]:
    total: dict[int, Any] = {}
    for part in parts:
        for key, gradient in part.items():
            total[key] = total.get(key, 0) + gradient
    return total


class Twins:
    """The tensors of a replay, each the twin of a tensor of the step."""

    def __init__(
        self,
        weights: Sequence[Any],
        fmt: Format,
        limits: Limits,
        *,
        rounds: Callable[[TapedOperation], bool] | None = None,
    ) -> None:
        """Begin a replay.

        Args:
            weights: tensors whose gradients will be computed.
            fmt: the format to round to.
            limits: which ends of its range are kept.
            rounds: returns whether an operation is rounded; None for the operations that the run's policy rounds.
        """
        self._round = _rounding(fmt, limits)
        self._rounds = rounds or (lambda operation: operation.rounds)
        self._pairs: dict[int, tuple[Any, Any]] = {}
        """Each tensor of the step with its twin, by the tensor's id, which is unique while the tensor is alive."""
        for weight in weights:
            leaf = weight.detach()
            leaf.stop_gradient = False
            self._pairs[id(weight)] = weight, leaf

    def of(self, tensor: Any) -> Any:
        """Return the twin of a tensor; a tensor that the step did not compute is a constant."""
        if id(tensor) not in self._pairs:
            self._pairs[id(tensor)] = tensor, tensor.detach()
        return self._pairs[id(tensor)][1]

    def run(self, operation: TapedOperation) -> None:
        """Run an operation again."""
        if operation.random is not None:
            paddle.set_rng_state(operation.random)
        writes = operation.name.endswith("_") or operation.name == "batch_norm"
        read = (lambda t: self.of(t).clone() if self.of(t).stop_gradient else self.of(t)) if writes else self.of
        args, kwargs = mapped(operation.args, read), mapped(operation.kwargs, read)
        rounds = self._rounds(operation)
        if rounds:
            args, kwargs = mapped(args, self._rounded), mapped(kwargs, self._rounded)
        result = operation.function(*args, **kwargs)
        found = tensors([args[0] if operation.name == "setitem_" else result])
        if rounds:
            found = [self._rounded(t) for t in found]
        for original, twin in zip(operation.results, found, strict=True):
            self._pairs[id(original)] = original, twin

    def _rounded(self, tensor: Any) -> Any:
        return self._round.apply(tensor) if is_fp32(tensor) else tensor


def _rounding(fmt: Format, limits: Limits) -> Any:
    def rounded(tensor: Any) -> Any:
        return paddle.to_tensor(
            rounded_within(array_of(tensor), fmt, limits), dtype=FP32.dtype_name, place=tensor.place
        )

    class Rounding(PyLayer):  # type: ignore[misc]
        """A rounding of a tensor and of its gradient."""

        @staticmethod
        def forward(ctx: Any, tensor: Any) -> Any:
            return rounded(tensor)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return rounded(gradient)

    return Rounding
