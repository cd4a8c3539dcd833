"""Emulate the arithmetic of 16-bit matrix units in FP32.

A matrix unit reads 16-bit operands, multiplies them exactly (a product of two 11-bit significands fits FP32's 24
bits), adds in FP32 and rounds each result once. So rounding the operands, multiplying in FP32 and rounding the result
gives the same numbers up to the order of the FP32 sums: at least 99.7% of elements are bit-identical to native
half kernels, the rest differ by one unit in the last place (``python -m benchmarks emulation``). The gradients with respect
to both operands are such products too and are rounded likewise, and so are gradients of gradients.

For the backward pass the 16-bit operands are kept, as on a GPU: FP32 copies are temporary. Operations with
a closed-form gradient (linear, matmul, convolution, attention on a CPU) keep only that; for the rest (``einsum``,
``addmm``, recurrent layers, attention with dropout) the backward pass runs the forward again, from the same state of
the random number generator: one more product in FP32 instead of twice the memory.

Code that is being traced (torch.compile) or transformed (torch.func) gets casts around the FP32 operation instead,
which gives the same numbers: the partitioner or the transform then chooses what is kept.

Covered: products, convolutions, attention, recurrent layers; results beyond the format's range become infinite and
those below its smallest subnormal zero, as on a GPU. Not covered: split-k sums in FP16, FP16 accumulation, the 16-bit
hidden state between the time steps of a recurrent layer, and the 16-bit probabilities inside fused attention kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mezzo.engine.matrix_units.accumulation import product
from mezzo.engine.matrix_units.emulation_nodes import (
    Convolution,
    FlashAttention,
    Linear,
    TorchOperation,
    as_rows,
    by_casts,
    general,
    is_sparse,
    is_traced,
    matmul,
    wants,
)
from mezzo.engine.matrix_units.refusals import note_bf16, refusal
from mezzo.formats import BF16, FP16, FP32, Format, Recipe


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """One operation, computed as a 16-bit or 8-bit matrix unit would; called with the operation's arguments."""

    name: str
    """The operation's name in torch."""
    format: str
    """Name of the format that the unit multiplies in."""
    recipe: Recipe | None = None
    """How 8-bit operands are scaled; None for 16-bit ones."""
    accumulate: str = FP32.name
    """How the products of 8-bit operands are added up, in a policy's word."""
    run: TorchOperation = field(compare=False)
    ran: ClassVar[bool] = False
    """Whether this process has run any emulation; until then counters need not check whether an operation belongs to one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the emulation; while it runs, ``running()`` returns it to observers."""
        Emulation.ran = True
        before, _LOCAL.running = _LOCAL.running, self
        try:
            return self.run(*args, **kwargs)
        finally:
            _LOCAL.running = before


class _Local(threading.local):
    running: Emulation | None = None


_LOCAL = _Local()


def running() -> Emulation | None:
    """Return the emulation that computes a forward pass in this thread."""
    return _LOCAL.running


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Emulate ``torch.nn.functional.linear`` on 16-bit tensors."""
    if weight.dim() == 1 or is_traced() or is_sparse(x, weight):  # one output feature, without a dimension of its own
        result: Tensor = general(F.linear, x, weight, bias)
        return result
    y: Tensor = Linear.apply(x, weight, bias)
    return y


def _mm(input: Tensor, mat2: Tensor) -> Tensor:
    if input.dim() != 2 or mat2.dim() != 2:
        return torch.mm(input, mat2)  # torch raises
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
    if is_traced():
        y: Tensor = by_casts(torch.ops.aten.convolution, batched, weight, bias, *settings)
    else:
        y = Convolution.apply(batched, weight, bias, settings)
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
    if dropout_p == 0.0 and flash and query.device.type == "cpu" and not is_traced():
        mask = None if attn_mask is None else _additive(attn_mask)
        y: Tensor = FlashAttention.apply(query, key, value, mask, is_causal, scale)
        return y
    result: Tensor = general(
        F.scaled_dot_product_attention,
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        draws=dropout_p > 0.0,
    )
    return result


def _additive(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, float("-inf"))
    return mask.float()


def _convolve(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    *_: Any,
) -> Tensor:
    return _convolution(input, weight, bias, transposed, (stride, padding, dilation, output_padding, groups))


def _recurrent(op: TorchOperation) -> TorchOperation:
    def layer(*args: Any, **kwargs: Any) -> Any:
        # Arguments end with ..., num_layers, dropout, train, bidirectional[, batch_first]; cells have none of these.
        draws = any(isinstance(a, float) and a > 0.0 for a in args)
        return general(op, *args, draws=draws, keeps=True, **kwargs)  # the gates of every time step

    return layer


def _generic(op: TorchOperation) -> TorchOperation:
    def call(*args: Any, **kwargs: Any) -> Any:
        return general(op, *args, **kwargs)

    return call


SPECIAL: dict[str, TorchOperation] = {
    "linear": linear,
    "matmul": matmul,
    "mm": _mm,
    "bmm": _bmm,
    "mv": _mv,
    "conv1d": _conv,
    "conv2d": _conv,
    "conv3d": _conv,
    "conv_transpose1d": _conv_transpose,
    "conv_transpose2d": _conv_transpose,
    "conv_transpose3d": _conv_transpose,
    "convolution": _convolve,
    "_convolution": _convolve,
    "scaled_dot_product_attention": attention,
}


def emulation(
    op: TorchOperation, name: str, *, low: str, family: str, recipe: Recipe | None, accumulate: str = FP32.name
) -> Emulation:
    """Return the emulation of torch's ``op``.

    Args:
        op: the torch function; the emulation takes its arguments, with 16-bit tensors.
        name: its name without overload (``linear``).
        low: name of the 16-bit format.
        family: its family in the op lists.
        recipe: how linear layers compute in 8 bits; None if they stay in 16 bits.
        accumulate: how their products are added up, in a policy's word.
    """
    if recipe is not None and name == "linear":
        in_8_bits = partial(float8_linear, recipe=recipe, accumulate=accumulate)
        return Emulation(name=name, format=recipe.values.name, recipe=recipe, accumulate=accumulate, run=in_8_bits)
    run = _recurrent(op) if family == "rnn" else SPECIAL.get(name) or _generic(op)
    return Emulation(name=name.strip("_"), format=low, run=run)


# A layer has three products: the result, the gradient of its input and the gradient of its weight. Both operands of each
# are multiplied by a scale and rounded to 8 bits, their products are added up in FP32 (or as in ``accumulation``), divided by the scales
# and rounded to BF16. Each use computes its scale from the largest magnitude: ``scale = max / amax`` (arXiv:2209.05433,
# section 3.2). The two recipes are torchao's, which computes them on a GPU:
#
# ``tensorwise``  one scale per tensor; values and weights in E4M3, gradients in E5M2
# ``rowwise``     all in E4M3; one scale for each row that a product sums over, the largest power of two not above ``max / amax``
#
# E4M3 and E5M2 are the Open Compute Project's, or the FNUZ ones of AMD's MI300, to which torchao rounds there.
#
# Weights are rounded from the format in which they are stored, not from BF16. The BF16 input and the weight itself are
# kept for the backward pass and rounded again there, as torchao does: 8-bit values are operands of a product and are
# not stored.
class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Recipe, accumulate: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe, ctx.accumulate, ctx.stands_for = recipe, accumulate, recipe.values.name
        formats = recipe.values, recipe.values
        return (
            _product(as_rows(x), weight.mT, formats, accumulate, "results")
            .to(x.dtype)
            .reshape(*x.shape[:-1], len(weight))
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        formats = ctx.recipe.gradients, ctx.recipe.values
        rows = as_rows(grad)
        grad_x = grad_weight = None
        if wants(ctx, 0):
            grad_x = _product(rows, weight, formats, ctx.accumulate, "gradients").to(x.dtype).reshape(x.shape)
        if wants(ctx, 1):
            wide = _product(rows.mT, as_rows(x), formats, ctx.accumulate, "gradients")
            grad_weight = wide.to(x.dtype).to(weight.dtype)  # a GPU's product gives BF16 for an FP32 weight, too
        return grad_x, grad_weight, None, None


def _product(
    a: Tensor, b: Tensor, formats: tuple[Format, Format], accumulate: str, of: Literal["results", "gradients"]
) -> Tensor:
    """Return ``a @ b`` in FP32, with operands rounded to ``formats``."""
    (stored_a, factor_a), (stored_b, factor_b) = quantise(a, formats[0], along=-1), quantise(b, formats[1], along=0)
    if accumulate == FP32.name:
        return (stored_a.float() / factor_a) @ (stored_b.float() / factor_b)
    scales = factor_a.reciprocal(), factor_b.reciprocal()
    return product(stored_a, stored_b, scales, accumulate=accumulate, of=of)


def quantise(x: Tensor, fmt: Format, *, along: int) -> tuple[Tensor, Tensor]:
    """Return ``x`` times a factor in ``fmt``, a format with scales for tensors or rows, and that factor in FP32.

    The factor is the reciprocal of the scale, which maps the largest magnitude of the tensor, or of each row along a dimension, to the
    format's largest value, or below it if it is rounded to a power of two.
    """
    assert fmt.scaling is not None
    if x.numel() == 0:  # no largest magnitude
        return x.to(fmt.dtype), torch.ones((), device=x.device)
    magnitudes = x.abs()
    amax = magnitudes.amax() if fmt.scaling.extent == "tensor" else magnitudes.amax(dim=along, keepdim=True)
    # torchao's minimum: smaller magnitudes get the scale of this one, and zeros a finite scale. A literal, because a compiler
    # with dynamic shapes turns a global number into a variable, which fails inside an autograd function.
    least = amax.float().clamp(min=1e-12)
    # torch divides a number by a tensor as a product with the reciprocal, which rounds twice.
    factor = torch.full_like(least, fmt.max) / least
    if fmt.scaling.rule == "rceil":
        factor = factor.log2().floor().exp2()
    return (x.float() * factor).clamp(-fmt.max, fmt.max).to(fmt.dtype), factor


def float8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, recipe: Recipe, accumulate: str = FP32.name
) -> Tensor:
    """Emulate a linear layer in FP8; ``x``, ``bias`` and result are BF16, ``weight`` is BF16 or FP32."""
    if weight.dim() == 1:  # one output feature, without a dimension of its own
        return float8_linear(x, weight[None], bias, recipe=recipe, accumulate=accumulate).squeeze(-1)
    y: Tensor = _Float8Linear.apply(x, weight, recipe, accumulate)
    return y if bias is None else y + bias


# cuFFT transforms FP16 if all sizes are powers of two, and returns its complex format. CPUs have no such kernel, so it is emulated: one
# transform in FP32 and one rounding. cuFFT refuses other sizes in FP16, and torch 2.13 refuses BF16 (``aten/src/ATen/native``:
# ``SpectralOps.cpp``, ``cuda/CuFFTPlanCache.h``). A backward pass transforms the same sizes.
DTYPES = frozenset((FP16.dtype, BF16.dtype, torch.complex32))
"""The dtypes of the operands to which the rules apply."""
PRIMITIVES = ("_fft_r2c", "_fft_c2r", "_fft_c2c")
"""The transforms that others call, such as ``stft``; their arguments are dimensions, normalization and, for ``_fft_c2r``, the last size."""
_TO_REAL = ("hfft", "irfft", "_fft_c2r")
_SIZES = "cuFFT only supports dimensions whose sizes are powers of two when computing in half precision, but got a signal size of{sizes}"
_UNSUPPORTED = "Unsupported dtype {dtype}"
_NO_PLAN = "cuFFT doesn't support tensor of type: {dtype}"


def fft(op: TorchOperation, name: str, *, refuses: bool) -> TorchOperation:
    """Return the transform ``name`` for 16-bit operands, as CUDA computes it.

    Args:
        op: the torch function.
        name: its name: ``fft_rfft2``, or one of ``PRIMITIVES``.
        refuses: whether to refuse what CUDA refuses.
    """
    in_bf16 = _NO_PLAN if name in PRIMITIVES else _UNSUPPORTED

    def transform(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if x.dtype not in (FP16.dtype, torch.complex32):
            if refuses and x.dtype is BF16.dtype:
                raise refusal(in_bf16, x)
            result: Tensor = op(x, *args, **kwargs)
            return result
        sizes = _signal_sizes(name, x, *args, **kwargs) if refuses and x.numel() else []
        if any(size & (size - 1) for size in sizes if size > 0):
            raise refusal(_SIZES.format(sizes=sizes), x)
        if refuses and x.dtype is FP16.dtype:
            note_bf16(in_bf16, x)
        wide: Tensor = op(x.to(torch.complex64) if x.is_complex() else x.to(FP32.dtype), *args, **kwargs)
        return wide.to(torch.complex32 if wide.is_complex() else FP16.dtype)

    return transform


def _signal_sizes(name: str, x: Tensor, *args: Any, **kwargs: Any) -> list[int]:
    """Return the sizes of the signals that a transform works on, in the order of its dimensions."""
    to_real = any(kind in name for kind in _TO_REAL) and "ihfft" not in name
    if name in PRIMITIVES:
        sizes = [x.size(dim) for dim in args[0]]
        return [*sizes[:-1], args[2]] if to_real else sizes
    given, dims = _size_and_dims(name, x, *args, **kwargs)
    sizes = [x.size(dim) if size in (None, -1) else int(size) for size, dim in zip(given, dims, strict=False)]
    return [*sizes[:-1], 2 * (sizes[-1] - 1)] if to_real and given[-1] in (None, -1) else sizes


def _size_and_dims(name: str, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Sequence[Any], Sequence[int]]:
    is_list = name[-1] in "2n"
    size = args[0] if args else kwargs.get("s" if is_list else "n")
    default = (-2, -1) if name.endswith("2") else None if is_list else -1
    dim: Any = args[1] if len(args) > 1 else kwargs.get("dim", default)
    if not is_list:
        return [size], [dim]
    if dim is None:
        dim = list(range(-len(size), 0)) if size is not None else list(range(x.dim()))
    return [None] * len(dim) if size is None else list(size), list(dim)
