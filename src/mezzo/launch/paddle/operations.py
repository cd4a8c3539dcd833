"""Patch Paddle's operations: round those that a policy lists, and count the FLOPs of one step by format.

Python calls an operation by its function in ``paddle._C_ops`` or, for a few, by an operator of ``paddle.Tensor``. Both
are replaced. Under an emulated policy, the operands and results of the operations in the lower-precision list are
rounded to the format, and so are the gradients of both in the backward pass: those of a result before the operation's
backward pass, those of an operand after it.

An operation is counted if the backward pass will need it, so that evaluations are not counted; its backward pass costs the same
again for each of its two operands that needs a gradient. Limits: products in traced programs and in
backward passes written by the script are not counted, nor is attention in a single kernel.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import paddle

from mezzo.formats import TF32
from mezzo.frameworks import paddle_ops
from mezzo.launch.paddle.state import PaddleRun
from mezzo.launch.paddle.surveys import format_name
from mezzo.launch.paddle.tape import tensors
from mezzo.launch.patches import Patches

Count = Callable[[Any, tuple[Any, ...], dict[str, Any]], float]


class Operations:
    """The patches that round and count operations."""

    def __init__(self, run: PaddleRun) -> None:
        self._run = run
        self.counting = False
        self.by_format: Counter[str] = Counter()
        self.outside_region = 0
        """FLOPs of forward code outside every region."""

    def install(self, patches: Patches) -> None:
        """Replace the operations that are rounded or counted until ``patches`` are undone."""
        policy = self._run.applied
        chosen = {} if policy is None or not policy.lowers else paddle_ops.precisions(policy)
        lower = {op for op, precision in chosen.items() if precision == "lower"}
        for op in sorted(lower | set(_COUNTS)):
            if hasattr(paddle._C_ops, op):
                patches.wrap(paddle._C_ops, op, functools.partial(self._around, op, op in lower))
        for name, op in paddle_ops.OPERATORS.items():
            if op in lower or op in _COUNTS:
                patches.wrap(paddle.Tensor, name, functools.partial(self._around, op, op in lower))

    def _around(self, op: str, lower: bool, original: Callable[..., Any]) -> Callable[..., Any]:
        run, count = self._run, _COUNTS.get(op)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            rounds = lower and run.emulates and run.lowered_here()
            counts = self.counting and count is not None and not run.local.in_backward
            if not (rounds or counts) or not paddle.in_dynamic_mode():
                return original(*args, **kwargs)
            if rounds:
                args = run.round(args)
                kwargs = {name: run.round(value) for name, value in kwargs.items()}
            result = original(*args, **kwargs)
            if counts and count is not None:
                needed = len(operands_that_need_gradients(op, args, kwargs))
                if needed and paddle.is_grad_enabled():
                    self._add(int(count(result, args, kwargs)) * (1 + needed), self._format(result, rounded=rounds))
            return run.round_result(result) if rounds else result

        return call

    def _add(self, flops: int, name: str) -> None:
        self.by_format[name] += flops
        if not self._run.local.depth:
            self.outside_region += flops

    def _format(self, result: Any, *, rounded: bool) -> str:
        policy, device = self._run.policy, self._run.device
        if policy is not None and rounded:
            return policy.storage.name
        if policy is not None and policy.compute == "tf32" and device is not None and device.kind == "cuda":
            return TF32.name
        return format_name(tensors([result])[0])


def is_product(op: str) -> bool:
    """Return whether an operation of ``paddle._C_ops`` is a matrix product or convolution."""
    return op in _COUNTS


def flops_of(op: str, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the FLOPs of a product, forward only."""
    return int(_COUNTS[op](result, args, kwargs))


def operands_that_need_gradients(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return those of a product's two operands that need a gradient, each as its first tensor that does."""
    values = [*args, *kwargs.values()]
    if op == "einsum":
        values = list(values[0])
    elif op in _POSITIONS:
        values = [values[position] for position in _POSITIONS[op]]
    needing = [[t for t in tensors([value]) if not t.stop_gradient] for value in values[:2]]
    return [of_operand[0] for of_operand in needing if of_operand]


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, *names: str) -> Any:
    """Return an argument of a call, by its position or by one of its names; None if it was left out."""
    return args[position] if len(args) > position else next((kwargs[name] for name in names if name in kwargs), None)


def _matmul(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    x = argument(args, kwargs, 0, "x")
    transposed = argument(args, kwargs, 2, "transpose_x") is True and len(x.shape) > 1
    return float(2 * result.size * x.shape[-2 if transposed else -1])


def _product(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    return float(2 * result.size * argument(args, kwargs, 0, "x").shape[-1])


def _with_addend(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    return float(2 * result.size * argument(args, kwargs, 1, "x").shape[-1])


def _convolution(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    # Every weight is used at every position, once per entry of the batch; the weight's shape already accounts for groups.
    weight = argument(args, kwargs, 1, "filter")
    return float(2 * weight.size * result.size / weight.shape[0])


def _transposed(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    x, weight = argument(args, kwargs, 0, "x"), argument(args, kwargs, 1, "filter")
    return float(2 * weight.size * x.size / weight.shape[0])


def _einsum(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Count a product of two operands in one contraction; sums over a single operand are not products."""
    operands, equation = argument(args, kwargs, 0, "x"), argument(args, kwargs, 1, "equation")
    terms = equation.replace(" ", "").split("->")[0].split(",")
    if len(terms) != 2:
        return 0.0
    pairs = zip(terms, operands, strict=True)
    sizes = {label: n for term, t in pairs for label, n in zip(reversed(term), reversed(t.shape), strict=False)}
    return float(2 * math.prod(sizes.values()))


def _recurrent(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    x, weights = argument(args, kwargs, 0, "x"), argument(args, kwargs, 2, "weight_list")
    return float(2 * x.size / x.shape[-1] * sum(w.size for w in weights if len(w.shape) == 2))


_POSITIONS = {"addmm": (1, 2), "addmm_": (1, 2), "baddbmm": (1, 2), "rnn": (0, 2)}
"""Positions of a product's two operands among the arguments, if not the first two."""

_COUNTS: dict[str, Count] = {
    "matmul": _matmul,
    "linear": _product,
    "linear_v2": _product,
    "bmm": _product,
    "mv": _product,
    "addmm": _with_addend,
    "addmm_": _with_addend,
    "baddbmm": _with_addend,
    "einsum": _einsum,
    "conv2d": _convolution,
    "depthwise_conv2d": _convolution,
    "conv3d": _convolution,
    "conv2d_transpose": _transposed,
    "depthwise_conv2d_transpose": _transposed,
    "conv3d_transpose": _transposed,
    "rnn": _recurrent,
}
"""The FLOP formula of each operation, from its result and its arguments."""
