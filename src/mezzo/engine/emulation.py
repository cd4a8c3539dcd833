"""The arithmetic of 16-bit matrix units, done in FP32.

A matrix unit reads 16-bit operands, multiplies them exactly (a product of two 11-bit significands fits FP32's 24
bits), adds in FP32 and rounds each result once. So rounding the operands, multiplying in FP32 and rounding the result
gives the same numbers up to the order of the FP32 sums: 99.7% of elements and more are equal to the bit to native
half kernels, the rest differ by one unit in the last place (``benchmarks/emulation.py``). The gradients with respect
to both operands are such products too and are rounded likewise.

What is kept for the backward pass is the 16-bit operands, as on a GPU: the FP32 copies are temporary. Operations with
a closed-form gradient (linear, matmul, convolution, attention on a CPU) keep only that; for the rest (``einsum``,
``addmm``, recurrent layers) the backward pass runs the forward again, one more product in FP32 instead of twice the
memory. With dropout inside, running again would draw other numbers, so there FP32 copies are kept.

Covered: products, convolutions, attention, recurrent layers; results beyond the format's range become infinite and
those below its smallest subnormal zero, as on a GPU. Not covered: split-k sums in FP16, FP16 accumulation, the 16-bit
hidden state between the time steps of a recurrent layer, and the 16-bit probabilities inside fused attention kernels.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from mezzo.engine.float8 import LINEAR
from mezzo.formats import BF16, FP16

Op = Callable[..., Any]
_HALF = (FP16.dtype, BF16.dtype)


_running = threading.local()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        wide_bias = None if bias is None else bias.float()
        return F.linear(x.float(), weight.float(), wide_bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wide = grad.float()
        rows = wide.reshape(-1, wide.shape[-1])
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = (wide @ weight.float()).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (rows.mT @ x.float().reshape(-1, x.shape[-1])).to(weight.dtype)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0).to(weight.dtype)
        return grad_x, grad_weight, grad_bias


class _MatMul(torch.autograd.Function):
    """Multiply matrices or batches of them (both operands with two dimensions or more)."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return torch.matmul(a.float(), b.float()).to(a.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        wide = grad.float()
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = (wide @ b.float().mT).sum_to_size(a.shape).to(a.dtype)
        if ctx.needs_input_grad[1]:
            if b.dim() == 2:  # fold the batch into the rows: one product instead of a batch of them and a sum
                grad_b = a.float().reshape(-1, a.shape[-1]).mT @ wide.reshape(-1, wide.shape[-1])
            else:
                grad_b = (a.float().mT @ wide).sum_to_size(b.shape)
            grad_b = grad_b.to(b.dtype)
        return grad_a, grad_b


class _Convolution(torch.autograd.Function):
    """Convolve in one to three dimensions, forward or transposed; ``settings`` are aten::convolution's from ``stride`` on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, settings: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings, ctx.bias_sizes = settings, None if bias is None else list(bias.shape)
        wide_bias = None if bias is None else bias.float()
        y: Tensor = torch.ops.aten.convolution(x.float(), weight.float(), wide_bias, *settings)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        mask = [*ctx.needs_input_grad[:2], ctx.bias_sizes is not None and ctx.needs_input_grad[2]]
        grads = torch.ops.aten.convolution_backward(
            grad.float(), x.float(), weight.float(), ctx.bias_sizes, *ctx.settings, mask
        )
        return *(None if g is None else g.to(x.dtype) for g in grads), None


class _FlashAttention(torch.autograd.Function):
    """Attend with torch's FP32 flash kernel for CPUs: queries, keys and values of shape (batch, heads, length, width)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: Any) -> Tensor:
        wide, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.float(), k.float(), v.float(), 0.0, causal, attn_mask=mask, scale=scale
        )
        out: Tensor = wide.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, log_sum, mask)
        ctx.causal, ctx.scale = causal, scale
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


class _Recomputed(torch.autograd.Function):
    """Run any operation in FP32 on 16-bit tensors; the backward pass runs it again rather than keep FP32 copies."""

    @staticmethod
    def forward(ctx: Any, call: Callable[..., Any], low: torch.dtype, *tensors: Tensor) -> Any:
        ctx.save_for_backward(*tensors)
        ctx.call = call
        results, ctx.results_spec = tree_flatten(call(*_widen(tensors)))
        return tuple(_narrow(results, low)) if len(results) > 1 else _narrow(results, low)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        create_graph = torch.is_grad_enabled()  # a gradient of this gradient was asked for
        needed = [i for i, wants in enumerate(ctx.needs_input_grad[2:]) if wants]
        with torch.enable_grad():
            if not create_graph:
                saved = [t.detach().requires_grad_(i in needed) for i, t in enumerate(saved)]
            results, _ = tree_flatten(ctx.call(*_widen(saved)))
            found = torch.autograd.grad(
                results,
                [saved[i] for i in needed],
                [g.to(r.dtype) for g, r in zip(grads, results, strict=True)],
                create_graph=create_graph,
                allow_unused=True,
            )
        by_input = dict(zip(needed, found, strict=True))
        return None, None, *(by_input.get(i) for i in range(len(saved)))


def _widen(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.float() if t.dtype in _HALF else t for t in tensors]


def _narrow(results: Sequence[Any], low: torch.dtype) -> list[Any]:
    return [r.to(low) if isinstance(r, Tensor) and r.is_floating_point() else r for r in results]


def _general(op: Op, *args: Any, **kwargs: Any) -> Any:
    """Emulate ``op`` for its 16-bit tensor arguments wherever they stand, keeping only those for the backward pass."""
    if torch.compiler.is_compiling():  # the partitioner of torch.compile decides what is kept
        return _keeping_copies(op, *args, **kwargs)
    leaves, spec = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dtype in _HALF]
    given = [leaves[i] for i in places]
    for place in places:
        leaves[place] = None  # the call below must not keep alive what a checkpoint or an offloading hook lets go

    def call(*tensors: Tensor) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        inner_args, inner_kwargs = tree_unflatten(filled, spec)
        return op(*inner_args, **inner_kwargs)

    return _Recomputed.apply(call, given[0].dtype, *given)


def _keeping_copies(op: Op, *args: Any, **kwargs: Any) -> Any:
    """Emulate ``op`` by casts around it: FP32 copies stay for the backward pass, and random numbers are drawn once."""
    leaves, spec = tree_flatten((args, kwargs))
    low = next(leaf.dtype for leaf in leaves if isinstance(leaf, Tensor) and leaf.dtype in _HALF)
    wide = [x.float() if isinstance(x, Tensor) and x.dtype in _HALF else x for x in leaves]
    inner_args, inner_kwargs = tree_unflatten(wide, spec)
    results, results_spec = tree_flatten(op(*inner_args, **inner_kwargs))
    return tree_unflatten(_narrow(results, low), results_spec)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Emulate ``torch.nn.functional.linear`` on 16-bit tensors."""
    if weight.dim() == 1:  # one output feature, without a dimension of its own
        result: Tensor = _general(F.linear, x, weight, bias)
        return result
    y: Tensor = _Linear.apply(x, weight, bias)
    return y


def matmul(input: Tensor, other: Tensor) -> Tensor:
    """Emulate ``torch.matmul`` (also mm, bmm and mv) on 16-bit tensors of any broadcastable shapes."""
    a = input.unsqueeze(0) if input.dim() == 1 else input
    b = other.unsqueeze(-1) if other.dim() == 1 else other
    y: Tensor = _MatMul.apply(a, b)
    if other.dim() == 1:
        y = y.squeeze(-1)
    return y.squeeze(-1 if other.dim() == 1 else -2) if input.dim() == 1 else y


def _mm(input: Tensor, mat2: Tensor) -> Tensor:
    if input.dim() != 2 or mat2.dim() != 2:
        return torch.mm(input, mat2)  # torch's own refusal
    return matmul(input, mat2)


def _bmm(input: Tensor, mat2: Tensor) -> Tensor:
    if input.dim() != 3 or mat2.dim() != 3 or len(input) != len(mat2):
        return torch.bmm(input, mat2)
    return matmul(input, mat2)


def _mv(input: Tensor, vec: Tensor) -> Tensor:
    if input.dim() != 2 or vec.dim() != 1:
        return torch.mv(input, vec)
    return matmul(input, vec)


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, settings: Sequence[Any]) -> Tensor:
    spatial = weight.dim() - 2
    stride, padding, dilation, output_padding, groups = settings
    if isinstance(padding, str):
        x, padding = _resolve_padding(x, weight, padding, _each(dilation, spatial))
    batched = x if x.dim() == spatial + 2 else x.unsqueeze(0)
    lists = [_each(value, spatial) for value in (stride, padding, dilation)]
    settings = (*lists, transposed, _each(output_padding, spatial), groups)
    y: Tensor = _Convolution.apply(batched, weight, bias, settings)
    return y if batched is x else y.squeeze(0)


def _each(value: int | Sequence[int], spatial: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * spatial if len(values) == 1 else values


def _resolve_padding(x: Tensor, weight: Tensor, padding: str, dilation: list[int]) -> tuple[Tensor, list[int]]:
    if padding == "valid":
        return x, [0]
    total = [d * (size - 1) for d, size in zip(dilation, weight.shape[2:], strict=True)]
    if any(t % 2 for t in total):  # torch puts the odd row at the end
        extra = [side for t in reversed(total) for side in (0, t % 2)]
        x = F.pad(x, extra)
    return x, [t // 2 for t in total]


def _conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    return _convolution(input, weight, bias, False, (stride, padding, dilation, 0, groups))


def _conv_transpose(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    settings = (stride, padding, dilation, output_padding, groups)
    return _convolution(input, weight, bias, True, settings)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Emulate ``torch.nn.functional.scaled_dot_product_attention`` on 16-bit tensors."""
    shapes_fit = query.dim() == 4 and query.shape[:2] == key.shape[:2] == value.shape[:2]
    mask_fits = attn_mask is None or (not attn_mask.requires_grad and attn_mask.dim() in (2, 4))
    flash = shapes_fit and mask_fits and query.shape[-1] == value.shape[-1] and query.numel() > 0
    if dropout_p == 0.0 and flash and query.device.type == "cpu":
        mask = None if attn_mask is None else _additive(attn_mask)
        y: Tensor = _FlashAttention.apply(query, key, value, mask, is_causal, scale)
        return y
    run = _general if dropout_p == 0.0 else _keeping_copies
    result: Tensor = run(
        F.scaled_dot_product_attention,
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return result


def _additive(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, float("-inf"))
    return mask.float()


def _recurrent(op: Op) -> Op:
    def layer(*args: Any, **kwargs: Any) -> Any:
        # Arguments end with ..., num_layers, dropout, train, bidirectional[, batch_first]; cells have none of these.
        draws = any(isinstance(a, float) and a > 0.0 for a in args)
        return (_keeping_copies if draws else _general)(op, *args, **kwargs)

    return layer


def _through(op: Op) -> Op:
    def general(*args: Any, **kwargs: Any) -> Any:
        return _general(op, *args, **kwargs)

    return general


SPECIAL: dict[str, Op] = {
    "linear": linear,
    "matmul": matmul,
    "__matmul__": matmul,
    "mm": _mm,
    "bmm": _bmm,
    "mv": _mv,
    "conv1d": _conv,
    "conv2d": _conv,
    "conv3d": _conv,
    "conv_transpose1d": _conv_transpose,
    "conv_transpose2d": _conv_transpose,
    "conv_transpose3d": _conv_transpose,
    "scaled_dot_product_attention": attention,
}


def emulated(op: Op, name: str, *, family: str, float8: str | None) -> Op:
    """Return the emulation of torch's ``op``, which the op lists call ``name``.

    Args:
        op: the torch function or method; the emulation takes its arguments, with 16-bit tensors.
        name: its name without module (``linear``).
        family: the family that the op lists give it.
        float8: by which recipe linear layers are computed in 8-bit formats, if they are.
    """
    if float8 is not None and name == "linear":
        return LINEAR[float8]
    return _named(_recurrent(op) if family == "rnn" else SPECIAL.get(name) or _through(op), name.strip("_"))


def running_operation() -> str:
    """Return which of torch's operations is being emulated in this thread; empty outside an emulation."""
    return getattr(_running, "op", "")


def _named(run: Op, name: str) -> Op:
    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # what is compiled has no observers, and must not depend on a thread's state
            return run(*args, **kwargs)
        before, _running.op = running_operation(), name
        try:
            return run(*args, **kwargs)
        finally:
            _running.op = before

    return call
