"""Round matrices to formats whose blocks share scales, as matrix units of Blackwell GPUs and MI350s read them.

A block is so many values of a row that a product sums over, or a tile of a weight. Its scale follows from its largest magnitude by a
``ScaleRule``; the values are divided by it, rounded to the elements' format to the nearest (ties to even) and saturate at its largest
value. ``rounded`` returns elements times scales in FP32, which holds the products of MX formats exactly; a scale that is no power of
two (NVFP4's, and FP8's exact ones) costs one rounding of FP32.

The arithmetic is torchao's, to the bit, where nothing else is said:

``rceil``  exact powers of two, as ``cvt.rp.satfinite.ue8m0x2.f32`` has them. torchao's emulation takes a logarithm in FP32 instead, which
           errs where ``amax / max`` lies less than a millionth above a power of two.
``floor``  ``to_mx``: a block whose scale is 2**-127 is divided by 2**-126.
``exact``  FP8: ``torch_blockwise_scale_*``, the quotient in FP64 rounded to FP32. NVFP4: the training
           kernels' (``_nvfp4_quantize``), all in FP32; the tensor's scale maps its largest magnitude to 448 * 6. TransformerEngine
           multiplies in another order and has no smallest scale, so single scales may differ.
``four_or_six``  sums of absolute errors, added up in FP64; a tie keeps 6, as in TransformerEngine.

One NaN makes its block NaN, for NVFP4 the whole tensor. An infinite value saturates in its block. The last block of a row may be shorter.

Stochastic rounding goes up with a probability equal to the distance from the element below, in 65,536ths. Its random bits are a hash of
the element's position and of a seed, which callers take from the values of the step: a repeated step draws the same bits, and the
script's random numbers are not used.

Limits: the random bits are not the ones of ``cvt.rs``; order of sums as in ``emulation``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mezzo.engine.kernels import cpu
from mezzo.engine.kernels.storage import mix
from mezzo.formats import BF16, E4M3, FP32, Format

HADAMARD = 16
"""Rows that the transform mixes."""
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The signs with which TransformerEngine randomises the transform (``quantization_ref_nvfp4.py``, ``0a6e0d6``)."""
_LEAST_FP8_AMAX = 1e-12
_SIX_BY_FOUR = 1.5
_EXPONENT_MASK = 0x7F800000


class Blocks(NamedTuple):
    """A matrix in blocks, in FP32."""

    elements: Tensor
    """The values of the elements' format, of the matrix's shape."""
    scales: Tensor
    """What to multiply each element with, of the matrix's shape."""


def rounded(x: Tensor, fmt: Format, *, along: int, seed: Tensor | None = None) -> Tensor:
    """Return a matrix rounded to ``fmt``, in FP32, for a product that sums along one of its dimensions.

    Args:
        x: (rows, columns), in FP32, FP16 or BF16.
        fmt: a format with scales for blocks.
        along: the dimension, 0 or 1.
        seed: of stochastic rounding, an integer without dimensions; None rounds to the nearest.
    """
    if not torch.compiler.is_compiling() and cpu.takes_values(x):
        encode = tensor_scale(x, fmt)
        numbers = (None if encode is None else float(encode)), (None if seed is None else int(seed))
        return cpu.round_blocks(x, fmt, along=along, encode=numbers[0], seed=numbers[1])
    elements, scales = in_blocks(x, fmt, along=along, seed=seed)
    return elements * scales


def in_blocks(x: Tensor, fmt: Format, *, along: int, seed: Tensor | None = None) -> Blocks:
    """Return the elements and scales of a matrix in blocks; arguments as for ``rounded``."""
    assert fmt.scaling is not None
    rows, columns = x.shape
    high, wide = fmt.scaling.tile(along)
    tiles = in_tiles(x.float(), high, wide)
    noise = None
    if seed is not None:
        at = torch.arange(rows * columns, device=x.device).view(rows, columns)
        noise = in_tiles((mix((at + seed) & 0xFFFFFFFF) >> 16).float() * 2.0**-16, high, wide)
    amax, encode = tiles.abs().amax(3, keepdim=True).amax(1, keepdim=True), tensor_scale(x, fmt)
    factor, scale = _factors(amax, fmt) if encode is None else _under_tensor(amax, fmt, encode)
    elements = round_elements(tiles * factor, fmt, noise=noise)
    if fmt.scaling.rule == "four_or_six":
        assert encode is not None
        factor, wider = _under_tensor(amax, fmt, encode, stretch=_SIX_BY_FOUR)
        four = round_elements(tiles * factor, fmt, noise=noise)
        is_four = _error(four * wider, tiles) < _error(elements * scale, tiles)
        elements, scale = torch.where(is_four, four, elements), torch.where(is_four, wider, scale)
    whole = tiles.shape[0] * high, tiles.shape[2] * wide
    return Blocks(*(t.expand_as(tiles).reshape(whole)[:rows, :columns] for t in (elements, scale)))


def block_scales(x: Tensor, fmt: Format, *, along: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a matrix in blocks, the scale of each block, and its largest magnitude; arguments as for ``rounded``.

    The shapes are (blocks down, rows, blocks across, columns), with one row and column for scales and magnitudes. Zeros complete the
    last blocks. Under ``four_or_six`` the largest magnitude is mapped to 6.
    """
    assert fmt.scaling is not None
    tiles = in_tiles(x.float(), *fmt.scaling.tile(along))
    amax, encode = tiles.abs().amax(3, keepdim=True).amax(1, keepdim=True), tensor_scale(x, fmt)
    _, scales = _factors(amax, fmt) if encode is None else _under_tensor(amax, fmt, encode)
    return tiles, scales, amax


def in_tiles(x: Tensor, high: int, wide: int) -> Tensor:
    """Return a matrix as (tiles down, rows, tiles across, columns), completed with zeros."""
    rows, columns = x.shape
    padded = F.pad(x, (0, -columns % wide, 0, -rows % high))
    return padded.view(-(-rows // high), high, -(-columns // wide), wide)


def _error(found: Tensor, exact: Tensor) -> Tensor:
    return (found - exact).abs().double().sum(dim=(1, 3), keepdim=True)


def tensor_scale(x: Tensor, fmt: Format) -> Tensor | None:
    """Return what all values of a tensor are multiplied with before its blocks' scales follow; None if ``fmt`` has no such scale."""
    assert fmt.scaling is not None
    if fmt.scaling.over is None:
        return None
    amax = x.abs().amax().float() if x.numel() else torch.zeros((), device=x.device)
    scale = (torch.full_like(amax, E4M3.max * fmt.max) / amax).clamp(max=FP32.max)
    return torch.where((amax == 0) | (scale == 0), 1.0, scale)


def _factors(amax: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Return what the values of blocks are multiplied with before they are rounded, and what their elements are multiplied with.

    Args:
        amax: the largest magnitudes, in FP32.
        fmt: the format.
    """
    assert fmt.scaling is not None
    if fmt.scaling.rule == "exact":
        exact = (fmt.max / amax.double().clamp(min=_LEAST_FP8_AMAX)).float()
        return exact, exact.reciprocal()
    if fmt.scaling.rule == "rceil":
        bits = (amax / fmt.max).view(torch.int32)
        field, mantissa = bits >> FP32.mantissa_bits, bits & 0x7FFFFF
        above = torch.where(field == 0, mantissa > 0x400000, mantissa > 0)  # 2**-127 is a subnormal: half the mantissa
        code = (field + above).clamp(max=254)
        factor = torch.where(code == 0, 1.0, torch.exp2((254 - code - FP32.bias).float()))
    else:
        code = ((amax.view(torch.int32) >> FP32.mantissa_bits) - fmt.max_exponent).clamp(min=0)
        factor = torch.exp2((254 - code.clamp(min=1) - FP32.bias).float())
    scale = torch.exp2((code - FP32.bias).float())
    return tuple(torch.where(amax.isnan(), torch.nan, t) for t in (factor, scale))  # type: ignore[return-value]


def _under_tensor(amax: Tensor, fmt: Format, encode: Tensor, *, stretch: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the same for scales in E4M3 under one of the tensor, ``encode``."""
    wanted = (amax / fmt.max) * encode * stretch
    scale = round_elements(wanted.clamp(min=E4M3.min_normal), E4M3) * encode.reciprocal()
    return scale.reciprocal().clamp(max=FP32.max), scale


def round_elements(x: Tensor, fmt: Format, *, noise: Tensor | None = None) -> Tensor:
    """Return FP32 values rounded to a format without its scales; they saturate, and NaN stays NaN.

    Args:
        x: the values, of any shape.
        fmt: the format.
        noise: numbers from 0 to below 1 of the same shape, for stochastic rounding; None rounds to the nearest, ties to even.
    """
    x = x.clamp(-fmt.max, fmt.max)
    power = (x.view(torch.int32) & _EXPONENT_MASK).view(FP32.dtype)
    step = power.clamp(min=fmt.min_normal) * fmt.eps
    if noise is None:
        return torch.round(x / step) * step
    up = torch.floor(x.abs() / step + noise) * step
    return up.clamp(max=fmt.max).copysign(x)


def seed_of(*tensors: Tensor) -> Tensor:
    """Return a seed that follows from the bits of tensors: 32 bits, without dimensions."""
    seed = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for tensor in tensors:
        words = tensor.detach().contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)
        seed = mix((seed * 31 + words.sum(dtype=torch.int64)) & 0xFFFFFFFF)
    return seed


def transformed(x: Tensor) -> Tensor:
    """Return a matrix whose rows are mixed 16 by 16 by the Hadamard transform with random signs, and rounded to its format.

    Row ``j`` of 16 becomes the sum of ``SIGNS[i] * (-1)**popcount(i & j) * row[i] / 4``: Sylvester's matrix, which is orthogonal. So a
    product of two transformed matrices that sums over rows is unchanged. Rows of zeros complete the last 16.
    """
    rows, columns = x.shape
    padded = F.pad(x, (0, 0, 0, -rows % HADAMARD))
    if not torch.compiler.is_compiling() and x.dtype is BF16.dtype and cpu.takes_values(padded):
        return cpu.hadamard(padded, torch.tensor(SIGNS, dtype=FP32.dtype))
    mixed = torch.matmul(hadamard(x.device).mT, padded.float().view(-1, HADAMARD, columns))
    return mixed.view(-1, columns).to(x.dtype)


def hadamard(device: torch.device) -> Tensor:
    """Return the transform's matrix, (16, 16) in FP32; its columns are the new rows, its transpose is its inverse."""
    places = torch.arange(HADAMARD, device=device)
    shared = places[:, None] & places
    odd = sum((shared >> bit) & 1 for bit in range(4)) % 2
    return (1.0 - 2.0 * odd) * torch.tensor(SIGNS, dtype=FP32.dtype, device=device)[:, None] / 4
