"""Patch Paddle's operations: round those that a policy lists, and count the FLOPs and bytes of one step by format.

Python calls an operation by its function in ``paddle._C_ops`` or, for a few, by an operator of ``paddle.Tensor``. Both
are replaced. Under an emulated policy, the operands and results of the operations in the lower-precision list are
rounded to the format, and so are their gradients: a result's gradient before the operation's backward pass, an operand's after it.

An operation is counted if the backward pass will need it, so that evaluations are not counted; its backward pass costs the same
again for each of its two operands that needs a gradient. Limits: products in traced programs and in
backward passes written by the script are not counted, nor is attention in a single kernel.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import paddle

from mezzo.formats import TF32
from mezzo.frameworks import paddle as paddle_policy
from mezzo.launch.paddle.backward import BackwardPasses
from mezzo.launch.paddle.state import PaddleRun
from mezzo.launch.paddle.surveys import format_name
from mezzo.launch.paddle.tape import tensors
from mezzo.launch.patches import Patches
from mezzo.records import Effective, Memory

CountCall = Callable[[Any, tuple[Any, ...], dict[str, Any]], float]


class OperationPatches:
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
        chosen = {} if policy is None or not policy.lowers else paddle_policy.precisions(policy)
        lower = {op for op, precision in chosen.items() if precision == "lower"}
        for op in sorted(lower | set(_COUNTS)):
            if hasattr(paddle._C_ops, op):
                patches.wrap(paddle._C_ops, op, functools.partial(self._around, op, op in lower))
        for name, op in paddle_policy.OPERATORS.items():
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
    """Return the operands of a product that need a gradient, each as its first tensor that does."""
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

_COUNTS: dict[str, CountCall] = {
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


# The second, because in the first the optimizer has no state yet; and only one step, because counting costs time (the first tenth
# of the steps is excluded from all timing). Activations are the tensors that autograd keeps for the backward pass, counted by Paddle's
# saved-tensor hooks, each storage once and without parameters.


class CountedStep:
    """The counts of one step's operations and bytes."""

    def __init__(self, run: PaddleRun, operations: OperationPatches, passes: BackwardPasses) -> None:
        self._run, self._operations, self._passes = run, operations, passes
        self._saved: dict[int, int] = {}
        self._hooks: Any = None
        self._has_all = True
        """Whether the hooks have seen all tensors that the step keeps for its backward passes."""
        self._bytes: dict[str, int] = {}
        """Bytes by kind, for the kinds that were measured."""
        self._counted_step: int | None = None
        self._flops: dict[str, int] = {}
        self._outside_region = 0

    def install(self, patches: Patches) -> None:
        """Set the hooks until ``patches`` are undone."""
        self._run.watchers.append(self._updated)
        self._passes.before.append(self._backward_begins)
        patches.around(paddle.base.core.eager, "run_partial_grad", self._differentiate)
        patches.on_undo(self._end)

    def _differentiate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``paddle.grad`` without the hooks, under which Paddle 3.3.1 cannot differentiate its results again.

        What it keeps is then unknown, and so are the step's activations.
        """
        hooks, self._hooks = self._hooks, None
        if hooks is None:
            return original(*args, **kwargs)
        self._has_all = False
        hooks.__exit__()
        try:
            return original(*args, **kwargs)
        finally:
            self._enter()

    def memory(self) -> Memory:
        """Return the bytes of the counted step, and the allocator's peaks over the run."""
        on_gpu = self._run.device is not None and self._run.device.kind == "cuda"
        kinds: dict[str, Any] = {f"{kind}_bytes": count for kind, count in self._bytes.items()}
        return Memory(
            **kinds,
            of_emulation=self._run.emulates,
            cuda_allocated_bytes=paddle.device.cuda.max_memory_allocated() if on_gpu else None,
            cuda_reserved_bytes=paddle.device.cuda.max_memory_reserved() if on_gpu else None,
        )

    def effective(self) -> Effective:
        """Return the formats of the counted step, and what was left alone."""
        run = self._run
        return Effective(
            flops_by_format=self._flops,
            emulated=run.emulates,
            counted_on_step=self._counted_step if self._flops else None,
            left_alone=[*run.left_alone.values(), *run.code_outside(self._outside_region, sum(self._flops.values()))],
        )

    def _updated(self) -> None:
        """Start counting after the first update; keep the counts at the second."""
        if self._counted_step is None:
            self._begin()
        elif self._operations.counting and self._run.num_updates >= self._counted_step:
            self._flops, self._outside_region = dict(self._operations.by_format), self._operations.outside_region
        if self._run.num_updates <= 2:
            self._weigh()

    def _begin(self) -> None:
        self._counted_step = self._run.num_updates + 1
        self._operations.counting = True
        self._enter()

    def _enter(self) -> None:
        self._hooks = paddle.autograd.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()

    def _backward_begins(self) -> None:
        if self._counted_step is None:
            return
        if self._run.num_updates >= self._counted_step:  # the counted update was made: this is the next step
            self._end()
            return
        parameters = {p.data_ptr() for p in self._run.parameters() if p._is_initialized()}
        activations = sum(size for pointer, size in self._saved.items() if pointer not in parameters)
        if self._has_all:
            self._bytes["activations"] = max(self._bytes.get("activations", 0), activations)
        else:
            self._bytes.pop("activations", None)
        self._saved = {}

    def _pack(self, tensor: Any) -> Any:
        if tensor._is_initialized():
            self._saved[tensor.data_ptr()] = _bytes(tensor)
        return tensor

    def _weigh(self) -> None:
        """Count the bytes of parameters, gradients and optimizer state."""
        parameters = self._run.parameters()
        now = {
            "parameters": _total(parameters),
            "gradients": _total(p.grad for p in parameters if p.grad is not None),
            "optimizer": sum(_optimizer_bytes(optimizer) for optimizer in list(self._run.optimizers)),
        }
        self._bytes.update({kind: max(count, self._bytes.get(kind, 0)) for kind, count in now.items()})

    def _end(self) -> None:
        self._operations.counting = False
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None


def _bytes(tensor: Any) -> int:
    return int(tensor.size) * int(tensor.element_size())


def _total(tensors: Iterable[Any]) -> int:
    return sum(_bytes(t) for t in tensors if t._is_initialized())


def _optimizer_bytes(optimizer: Any) -> int:
    slots = [tensor for by_parameter in optimizer._accumulators.values() for tensor in by_parameter.values()]
    return _total([*slots, *optimizer._master_weights.values()])
