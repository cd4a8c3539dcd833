"""Autograd functions that emulate the operations of 16-bit units in FP32, forward and backward.

Each node keeps 16-bit operands for its backward pass and rounds its gradients to their format. In a backward pass with
``create_graph``, a node uses operations that are emulated and differentiable themselves. A node's ``stands_for`` is the
format that it multiplies in.

Code that torch.compile traces or torch.func transforms gets casts around FP32 operations (``by_casts``) instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from mezzo.engine.casts.conversion import HALF
from mezzo.engine.gradients import ACCUMULATES
from mezzo.formats import BF16, FP16, FP32

TorchOperation = Callable[..., Any]
_NAMES = {f.dtype: f.name for f in (FP16, BF16)}
_Modes = torch._C._TorchDispatchModeKey


def stands_for(node: Any) -> str | None:
    """Return the name of the format that a node of the autograd graph emulates; None for any other node."""
    return getattr(node, "stands_for", None)


def is_recomputed(node: Any) -> bool:
    """Return whether a node's backward pass recomputes its forward pass, which a device with the format would not."""
    return getattr(node, "_forward_cls", None) is Recomputed


def wants(ctx: Any, operand: int, *, first: int = 0) -> bool:
    """Return whether the running backward pass needs the gradient of an operand of a node.

    ``torch.autograd.grad`` with other inputs does not, and torch's own nodes then skip it. Limit: torch does not tell for a leaf,
    whose gradient is always computed.

    Args:
        ctx: the node.
        operand: the number of the operand among the tensors.
        first: the place of the first tensor among the arguments; only tensors come after it.
    """
    needed = bool(ctx.needs_input_grad[first + operand])
    if not needed or torch.compiler.is_compiling():  # a compiler removes what nothing reads
        return needed
    node = ctx.next_functions[operand][0]
    return type(node) is ACCUMULATES or torch._C._will_engine_execute_node(node)


class Linear(torch.autograd.Function):
    """A linear layer: ``x`` of any shape (..., in), a weight (out, in), a bias (out)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(*_read_by_gradients(ctx, x, weight))
        ctx.has_bias, ctx.stands_for = bias is not None, _NAMES[x.dtype]
        wide_bias = None if bias is None else bias.float()
        return F.linear(x.float(), weight.float(), wide_bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # the backward pass runs with create_graph
            return _linear_gradients(ctx, grad, x, weight)
        wide = grad.float()
        rows = as_rows(wide)
        grad_x = grad_weight = grad_bias = None
        if wants(ctx, 0):
            grad_x = (wide @ weight.float()).to(weight.dtype)
        if wants(ctx, 1):
            grad_weight = (rows.mT @ as_rows(x.float())).to(x.dtype)
        if ctx.has_bias and wants(ctx, 2):
            grad_bias = rows.sum(0).to(grad.dtype)
        return grad_x, grad_weight, grad_bias


def as_rows(x: Tensor) -> Tensor:
    """Return ``x`` as one matrix with the rows of all its matrices; unlike ``reshape(-1, n)``, it accepts a width of zero."""
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


def _read_by_gradients(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the operands that the gradients of a product read: each operand's gradient reads the other operand."""
    return a if ctx.needs_input_grad[1] else None, b if ctx.needs_input_grad[0] else None


def _linear_gradients(ctx: Any, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor | None, ...]:
    """Compute the gradients of a linear layer with operations that are emulated and differentiable themselves."""
    rows = as_rows(grad)
    grad_x = matmul(grad, weight) if wants(ctx, 0) else None
    grad_weight = matmul(rows.mT, as_rows(x)) if wants(ctx, 1) else None
    wants_bias = ctx.has_bias and wants(ctx, 2)
    return grad_x, grad_weight, rows.float().sum(0).to(grad.dtype) if wants_bias else None


class MatMul(torch.autograd.Function):
    """A product of matrices or of batches of them (both operands have at least two dimensions)."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(*_read_by_gradients(ctx, a, b))
        ctx.shapes, ctx.stands_for = (a.shape, b.shape), _NAMES[a.dtype]
        return torch.matmul(a.float(), b.float()).to(a.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        shape_a, shape_b = ctx.shapes
        if torch.is_grad_enabled():
            return _matmul_gradients(ctx, grad, a, b)
        wide = grad.float()
        grad_a = grad_b = None
        if wants(ctx, 0):
            grad_a = (wide @ b.float().mT).sum_to_size(shape_a).to(b.dtype)
        if wants(ctx, 1):
            # Of a matrix: fold the batch into the rows, for one product instead of a batch of them and a sum.
            folds = len(shape_b) == 2
            product = as_rows(a.float()).mT @ as_rows(wide) if folds else (a.float().mT @ wide).sum_to_size(shape_b)
            grad_b = product.to(a.dtype)
        return grad_a, grad_b


def _matmul_gradients(ctx: Any, grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of a product with operations that are emulated and differentiable themselves."""
    shape_a, shape_b = ctx.shapes
    grad_a = matmul(grad, b.mT).sum_to_size(shape_a) if wants(ctx, 0) else None
    if not wants(ctx, 1):
        return grad_a, None
    if len(shape_b) == 2:  # one product and one rounding, as without create_graph
        return grad_a, matmul(as_rows(a).mT, as_rows(grad))
    return grad_a, matmul(a.mT, grad).sum_to_size(shape_b)


class Convolution(torch.autograd.Function):
    """A convolution in one to three dimensions, forward or transposed; ``settings`` are aten::convolution's from ``stride`` on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, settings: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings, ctx.bias_sizes = settings, None if bias is None else list(bias.shape)
        ctx.stands_for = _NAMES[x.dtype]
        wide_bias = None if bias is None else bias.float()
        y: Tensor = torch.ops.aten.convolution(x.float(), weight.float(), wide_bias, *settings)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        mask = [wants(ctx, 0), wants(ctx, 1), ctx.bias_sizes is not None and wants(ctx, 2)]
        backward = torch.ops.aten.convolution_backward
        if torch.is_grad_enabled():
            grads = general(backward, grad, x, weight, ctx.bias_sizes, *ctx.settings, mask)
            return *grads, None
        grads = backward(grad.float(), x.float(), weight.float(), ctx.bias_sizes, *ctx.settings, mask)
        return *(None if g is None else g.to(x.dtype) for g in grads), None


class FlashAttention(torch.autograd.Function):
    """Attention by torch's FP32 flash kernel for CPUs: queries, keys and values of shape (batch, heads, length, width)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: Any) -> Tensor:
        wide, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.float(), k.float(), v.float(), 0.0, causal, attn_mask=mask, scale=scale
        )
        out: Tensor = wide.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, log_sum, mask)
        ctx.causal, ctx.scale, ctx.stands_for = causal, scale, _NAMES[q.dtype]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sum, mask = ctx.saved_tensors
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad.float(),
            q.float(),
            k.float(),
            v.float(),
            out.float(),
            log_sum,
            0.0,
            ctx.causal,
            attn_mask=mask,
            scale=ctx.scale,
        )
        return *(g.to(q.dtype) for g in grads), None, None, None


class Recomputed(torch.autograd.Function):
    """Any operation, run in FP32 on 16-bit tensors; the backward pass recomputes it instead of keeping FP32 copies."""

    @staticmethod
    def forward(
        ctx: Any, call: Callable[..., Any], draws: bool, keeps: bool, low: torch.dtype, *tensors: Tensor
    ) -> Any:
        kept = [_kept_by_device(call, tensors, low)] if keeps and inner_memory.counted else []
        ctx.save_for_backward(*tensors, *kept)
        ctx.call, ctx.num_tensors, ctx.stands_for = call, len(tensors), _NAMES[low]
        ctx.random_state = _random_state(tensors[0].device) if draws else None
        results, ctx.results_spec = tree_flatten(call(*_widen(tensors)))
        return tuple(_narrow(results, low)) if len(results) > 1 else _narrow(results, low)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors[: ctx.num_tensors]
        create_graph = torch.is_grad_enabled()  # the backward pass runs with create_graph
        needed = [i for i in range(ctx.num_tensors) if wants(ctx, i, first=4)]
        with torch.enable_grad():
            if not create_graph:
                saved = [t.detach().requires_grad_(i in needed) for i, t in enumerate(saved)]
            with _replaying(ctx.random_state, saved[0].device):
                results, _ = tree_flatten(ctx.call(*_widen(saved)))
            pairs = [
                (r, g.to(r.dtype)) for r, g in zip(results, grads, strict=True) if r is not None and r.requires_grad
            ]
            gradients = torch.autograd.grad(
                [r for r, _ in pairs],
                [saved[i] for i in needed],
                [g for _, g in pairs],
                create_graph=create_graph,
                allow_unused=True,
            )
        by_input = dict(zip(needed, gradients, strict=True))
        return None, None, None, None, *(by_input.get(i) for i in range(len(saved)))


class InnerMemory:
    """Whether to count memory that a device keeps inside operations whose emulation keeps only the operands."""

    def __init__(self) -> None:
        self._counters = 0

    @property
    def counted(self) -> bool:
        """Whether anything counts it now."""
        return self._counters > 0

    def begin(self) -> None:
        """Count it, until ``end``."""
        self._counters += 1

    def end(self) -> None:
        """Count it no longer, unless something else counts it."""
        self._counters -= 1


inner_memory = InnerMemory()


def _kept_by_device(call: TorchOperation, tensors: Sequence[Tensor], low: torch.dtype) -> Tensor:
    """Return unused memory of the size that a device keeps inside an operation: what FP32 keeps, at the size of the 16-bit format.

    To measure it, the operation runs once more, only in the step whose bytes are counted.
    """
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    device = tensors[0].device
    with (
        _disable_current_modes(),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        _replaying(_random_state(device), device),
    ):
        wide = [t.detach().float().requires_grad_() for t in tensors]
        call(*wide)
    operands = {t.untyped_storage().data_ptr() for t in wide}
    num_bytes = sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in operands)
    return torch.empty(num_bytes * low.itemsize // FP32.dtype.itemsize, dtype=torch.uint8, device=device)


def _random_state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _replaying(state: Tensor | None, device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which random numbers continue from ``state``; the previous state is restored at its end."""
    return nullcontext() if state is None else _Replay(state, device)


class _Replay(AbstractContextManager[None]):
    def __init__(self, state: Tensor, device: torch.device) -> None:
        self._state, self._device = state, device

    def __enter__(self) -> None:
        self._before = _random_state(self._device)
        self._set(self._state)

    def __exit__(self, *error: object) -> None:
        self._set(self._before)

    def _set(self, state: Tensor) -> None:
        if self._device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(self._device).set_rng_state(state, self._device)


def _widen(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.float() if t.dtype in HALF else t for t in tensors]


def _narrow(results: Sequence[Any], low: torch.dtype) -> list[Any]:
    return [r.to(low) if isinstance(r, Tensor) and r.is_floating_point() else r for r in results]


def is_traced() -> bool:
    """Return whether torch.compile traces operations or torch.func transforms them: autograd functions do not support these."""
    return (
        torch._C._get_dispatch_mode(_Modes.FUNCTIONAL) is not None
        or torch._C._get_dispatch_mode(_Modes.PROXY) is not None
        or torch._C._are_functorch_transforms_active()
    )


def is_sparse(*tensors: Tensor) -> bool:
    """Return whether a tensor has one of the sparse layouts."""
    return any(tensor.layout is not torch.strided for tensor in tensors)


def general(op: TorchOperation, *args: Any, draws: bool = False, keeps: bool = False, **kwargs: Any) -> Any:
    """Emulate ``op`` for its 16-bit tensor arguments, and keep only these for the backward pass.

    ``draws`` says whether the operation draws random numbers, ``keeps`` whether a device keeps much more than its operands.
    """
    if is_traced():
        return by_casts(op, *args, **kwargs)
    leaves, spec = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dtype in HALF]
    operands = [leaves[i] for i in places]
    for place in places:  # the call below must not keep tensors alive that a checkpoint or an offloading hook releases
        leaves[place] = None

    def call(*tensors: Tensor) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        inner_args, inner_kwargs = tree_unflatten(filled, spec)
        return op(*inner_args, **inner_kwargs)

    return Recomputed.apply(call, draws, keeps, operands[0].dtype, *operands)


def by_casts(op: TorchOperation, *args: Any, **kwargs: Any) -> Any:
    """Emulate ``op`` with casts around it, whose gradients round like the emulation."""
    leaves, spec = tree_flatten((args, kwargs))
    low = next(leaf.dtype for leaf in leaves if isinstance(leaf, Tensor) and leaf.dtype in HALF)
    wide = [x.float() if isinstance(x, Tensor) and x.dtype in HALF else x for x in leaves]
    inner_args, inner_kwargs = tree_unflatten(wide, spec)
    results, results_spec = tree_flatten(op(*inner_args, **inner_kwargs))
    return tree_unflatten(_narrow(results, low), results_spec)


def matmul(input: Tensor, other: Tensor) -> Tensor:
    """Emulate ``torch.matmul`` (also mm, bmm and mv) on 16-bit tensors of any broadcastable shapes."""
    if is_traced():
        result: Tensor = by_casts(torch.matmul, input, other)
        return result
    if is_sparse(input, other):
        return general(torch.matmul, input, other)  # type: ignore[no-any-return] # torch has its own gradients for these
    a = input.unsqueeze(0) if input.dim() == 1 else input
    b = other.unsqueeze(-1) if other.dim() == 1 else other
    y: Tensor = MatMul.apply(a, b)
    if other.dim() == 1:
        y = y.squeeze(-1)
    return y.squeeze(-1 if other.dim() == 1 else -2) if input.dim() == 1 else y
