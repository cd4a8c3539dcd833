"""Add up products of 8-bit numbers as Hopper's matrix units do, in 14 significant bits.

An FP8 instruction of a Hopper GPU adds 32 products to an accumulator. What it does with them was found by experiment (DeepSeek-AI,
arXiv:2412.19437, section 3.5.2; Zhang et al., arXiv:2411.10958, section 3.2), and the whole of it by a model that agrees with the
hardware bit for bit (Xie et al., arXiv:2511.10909):

1. Each product is exact. Its exponent is the sum of its operands' exponents; a subnormal's is the smallest of its format.
2. The largest exponent of the 32 products and the accumulator sets a unit, 2^-13 times that power of two.
3. Every product and the accumulator are truncated toward zero to multiples of the unit; the 33 multiples are added exactly.
4. The sum is truncated toward zero to 14 significant bits: 8 bits of exponent and 13 of mantissa, with the sign FP22 (E8M13).

So a long sum loses part of nearly every product, and always towards zero: the error is a bias that grows with the sum's length. The
remedy is *promotion*: after some products the accumulator is added to a sum in FP32 and begins at zero again. The interval here is 128
products (N_C of arXiv:2412.19437, section 3.3.2; four instructions is also CUTLASS' default). torch's ``use_fast_accum=True``
means no promotion; torchao's recipes set it for results and not for gradients, which ``hopper`` stands for.

Limits: Ada's units split an instruction's 32 products in two, and Blackwell's keep 25 fractional bits, which FP32 sums stand for. How
often cuBLAS promotes is not documented, and nothing here has been compared with a GPU.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from mezzo.engine.kernels import cpu
from mezzo.formats import FP32, FP64, format_of
from mezzo.policyfields import PROMOTED

_PRODUCTS, _PROMOTED = 32, 128
"""The products that one instruction adds, and those after which a sum is promoted."""
_FRACTION_BITS = 13
_MANTISSA, _EXPONENT = (1 << FP32.mantissa_bits - _FRACTION_BITS) - 1, 0xFF << FP32.mantissa_bits
_LEAST = 2.0**-100
"""Below every product of 8-bit numbers, so that a unit is not zero if all products are."""
_TILE = 1 << 16
"""The products in a temporary tensor, which then fits a second-level cache."""


def product(
    a: Tensor,
    b: Tensor,
    scales: tuple[Tensor, Tensor],
    *,
    accumulate: str,
    of: Literal["results", "gradients"],
) -> Tensor:
    """Return the product of two matrices of scaled numbers.

    Args:
        a: 8-bit numbers, (m, k).
        b: 8-bit numbers, (k, n).
        scales: what the numbers of ``a`` and ``b`` are multiplied by, in FP32: single numbers; (m, 1) and (1, n); or, where sums are
            promoted, one for every 128 products, (m, k / 128) and (k / 128, n).
        accumulate: a policy's word, other than ``fp32``.
        of: whether the product is a layer's result or a gradient.

    Returns:
        The product in FP32, (m, n).
    """
    promotes = accumulate == PROMOTED or (accumulate == "hopper" and of == "gradients")
    result: Tensor = OPERATION(a, b, *scales, promotes)
    return result


def _mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, promotes: bool) -> Tensor:
    """Compute ``product``; of wide operands, which observers pass, the exact one."""
    by_block = scale_a.dim() == 2 and scale_a.shape[1] != 1
    if a.dtype in (FP32.dtype, FP64.dtype):
        if by_block:
            width, each = a.shape[1], _PROMOTED
            scale_a = scale_a.repeat_interleave(each, dim=1)[:, :width]
            scale_b = scale_b.repeat_interleave(each, dim=0)[:width]
            return (a * scale_a) @ (b * scale_b)
        return a @ b * scale_a * scale_b
    rows, columns = (a.float(), _powers(a)), (b.float(), _powers(b))
    built = a.is_cpu and cpu.library()[0] is not None
    compiled = built and all(bool(values.isfinite().all()) for values, _ in (rows, columns))
    add_up = cpu.sums if compiled else _sums
    if not by_block:
        return add_up(rows, columns, promoted=_PROMOTED if promotes else max(a.shape[1], 1)) * scale_a * scale_b
    total = torch.zeros(len(a), b.shape[1], device=a.device)
    for number, at in enumerate(range(0, a.shape[1], _PROMOTED)):
        block = slice(at, at + _PROMOTED)
        sums = add_up(
            (rows[0][:, block], rows[1][:, block]), (columns[0][block], columns[1][block]), promoted=_PROMOTED
        )
        total += sums * scale_a[:, number, None] * scale_b[number]
    return total


def _sums(rows: tuple[Tensor, Tensor], columns: tuple[Tensor, Tensor], *, promoted: int) -> Tensor:
    """Return the same as ``cpu.sums``, by torch's operations, on any device and for any numbers."""
    (num_rows, width), num_columns = rows[0].shape, columns[0].shape[1]
    sums = torch.zeros(num_rows, num_columns, device=rows[0].device)
    height = max(1, _TILE // (_PRODUCTS * max(num_columns, 1)))
    for top in range(0, num_rows, height):
        tile = slice(top, top + height)
        total = torch.zeros_like(sums[tile])
        for at in range(0, width, _PRODUCTS):
            inner = slice(at, at + _PRODUCTS)
            values, powers = (x[tile, inner, None] * y[inner] for x, y in zip(rows, columns, strict=True))
            total = _instruction(values, powers.amax(1), total)
            if (at + _PRODUCTS) % promoted == 0 or at + _PRODUCTS >= width:
                sums[tile] += total
                total.zero_()
    return sums


def _instruction(products: Tensor, largest: Tensor, total: Tensor) -> Tensor:
    """Return ``total`` after one instruction.

    Args:
        products: (m, 32, n); overwritten.
        largest: the power of two of the largest exponent among them, (m, n).
        total: the accumulator, (m, n).
    """
    per_unit = (
        torch.maximum(largest, _masked(total, _EXPONENT)).clamp_(min=_LEAST).reciprocal_().mul_(2.0**_FRACTION_BITS)
    )
    # At most 15 bits each, so that FP32 adds 33 of them exactly in any order. All are powers of two or their multiples.
    units = products.mul_(per_unit[:, None]).trunc_().sum(1).add_((total * per_unit).trunc_())
    return _masked(units.div_(per_unit), ~_MANTISSA).add_(0.0)  # no sum is -0


def _powers(x: Tensor) -> Tensor:
    """Return the power of two of each number's exponent, in FP32; 0 for 0."""
    fmt = format_of(x.dtype)
    assert fmt is not None
    wide = x.float()
    return _masked(wide, _EXPONENT).clamp_(min=fmt.min_normal).mul_(wide != 0)


def _masked(x: Tensor, mask: int) -> Tensor:
    return (x.view(torch.int32) & mask).view(FP32.dtype)


# One operation, so that a compiler leaves it alone and an observer sees one product.
_LIBRARY = torch.library.Library("mezzo", "DEF")  # its operations are removed when it is garbage-collected
_LIBRARY.define("mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, bool promotes) -> Tensor")
_LIBRARY.impl("mm", _mm, "CompositeExplicitAutograd")


def _shape(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, promotes: bool) -> Tensor:
    wide = a.dtype if a.dtype is FP64.dtype else FP32.dtype
    return a.new_empty((a.shape[0], b.shape[1]), dtype=wide)


torch.library.register_fake("mezzo::mm", _shape, lib=_LIBRARY)
OPERATION: Any = torch.ops.mezzo.mm
