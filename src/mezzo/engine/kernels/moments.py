"""The formats in which moments are kept between updates: FP32, BF16, or 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mezzo.engine.kernels.noise import round_to_bf16
from mezzo.formats import BF16, FP32

KINDS = {"fp32": FP32.dtype, "bf16": BF16.dtype, "8bit": torch.uint8}
"""Users' names of the formats, and the dtype that stores each."""
SIGNED = ("exp_avg", "momentum_buffer")
"""The moments that may be below 0."""
_HALF = 0x8000


def flat(tensor: Tensor) -> Tensor:
    """Return a tensor without gaps as one row, in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def zero_moment(kind: str, parameter: Tensor) -> Tensor:
    """Return a moment of zeros for ``parameter``."""
    if kind == "8bit":
        return torch.zeros(packed_bytes(parameter.numel()), dtype=torch.uint8, device=parameter.device)
    return torch.zeros_like(parameter, dtype=KINDS[kind], memory_format=torch.preserve_format)


def flat_fp32(kept: Tensor, count: int, *, signed: bool) -> Tensor:
    """Return a moment of ``count`` elements as flat FP32; an FP32 one itself, without a copy."""
    return unpack(kept, count, signed=signed) if kept.dtype is torch.uint8 else flat(kept).float()


def rounded(values: Tensor, kind: torch.dtype, noise: Tensor, *, signed: bool) -> Tensor:
    """Return flat FP32 ``values`` in a format of ``KINDS``, rounded by ``noise``."""
    if kind is torch.uint8:
        return pack(values, noise, signed=signed)
    return round_to_bf16(values, noise) if kind is BF16.dtype else values


def as_fp32(kept: Tensor, shape: torch.Size, strides: tuple[int, ...], *, signed: bool) -> Tensor:
    """Return a moment as an FP32 tensor of a shape and strides, with the values that an update uses."""
    count = shape.numel()
    return flat_fp32(kept, count, signed=signed).as_strided(shape, strides)


def stored_as(kind: str, values: Tensor, *, signed: bool) -> Tensor:
    """Return an FP32 moment in the format ``kind``, rounded to nearest; exact if it was in that format before."""
    nearest = torch.full((values.numel(),), _HALF, device=values.device)
    stored = rounded(flat(values), KINDS[kind], nearest, signed=signed)
    return stored if kind == "8bit" else stored.as_strided(values.shape, values.stride())


# --- Moments in 8 bits: three mantissa bits, an exponent relative to that of the largest in a block of 128 ----------------------

# A code byte of the first moment has a sign, four bits of exponent and three of mantissa; one of the second, which has no sign, five
# and three. Code 0 is 0; there are no subnormal numbers. The block's largest has exponent 15 (31), so numbers down to 2**-14
# (2**-30) of it keep three bits. Smaller ones are rounded at random to 0 or the smallest in the first moment, correct on
# average. In the second they become the smallest: a square rounded to 0 would make its weight's step a leap.
#
# Rounding must be stochastic (``noise``): with ``beta2=0.999`` a second moment moves by a thousandth per
# step and numbers of three bits are an eighth apart; rounded to nearest it would never move again.
#
# A packed moment is one row of bytes: the codes in the order in which the weights lie in memory, then the blocks' largest exponents in
# FP32's encoding; 255 means that the block had a value that is not finite, and unpacks to NaN. Bytes per parameter: 1 + 1/128.
# Block-wise scales for 8-bit moments are from Dettmers et al. (arXiv:2110.02861), who use a code book and
# round to nearest; a small float needs no table, which suits vector units.

BLOCK = 128
SIGNED_TOP, UNSIGNED_TOP = 15, 31
"""The exponent code of a block's largest, for first and second moments."""
SIGNED_FLOOR, UNSIGNED_FLOOR = 40, 64
"""FP32's exponent field of the smallest that a block's largest counts as: 2**-87, 2**-63."""


def packed_bytes(numel: int) -> int:
    """Return the length of a packed moment of ``numel`` elements."""
    return numel + -(-numel // BLOCK)


def pack(values: Tensor, noise: Tensor, *, signed: bool) -> Tensor:
    """Return a flat FP32 moment in 8 bits.

    Args:
        values: the values to round.
        noise: 16 random bits for each.
        signed: whether it is a first moment; a second one has no values below 0.
    """
    top, floor = (SIGNED_TOP, SIGNED_FLOOR) if signed else (UNSIGNED_TOP, UNSIGNED_FLOOR)
    count = values.numel()
    bits = values.view(torch.int32)
    magnitude = (bits & 0x7FFFFFFF).clamp(max=0x7F800000)  # every NaN has exponent 255, whatever its other bits
    rounded = (magnitude + (noise.int() << 4)) >> 20
    # The largest rounded value: so the results of unpack() are packed to the same bytes again, whatever the noise.
    largest = nn.functional.pad(rounded >> 3, (0, -count % BLOCK)).view(-1, BLOCK).amax(dim=1).clamp(min=floor)
    reach = largest.repeat_interleave(BLOCK)[:count] - top
    code = rounded - (reach << 3)
    if signed:
        smallest = (reach + 1) << 23
        chance = noise.float() * (smallest.view(FP32.dtype) * 2.0**-16)
        code = torch.where(magnitude >= smallest, code, torch.where(values.abs() > chance, 8, 0))
        code = code | ((bits >> 24) & 0x80)
    else:
        code = torch.where(magnitude > 0, code.clamp(min=8), 0)
    return torch.cat([code, largest]).to(torch.uint8)


def unpack(packed: Tensor, count: int, *, signed: bool) -> Tensor:
    """Return a packed moment of ``count`` elements as flat FP32."""
    top = SIGNED_TOP if signed else UNSIGNED_TOP
    code = packed[:count].int()
    largest = packed[count:].int().repeat_interleave(BLOCK)[:count]
    magnitude = code & 0x7F if signed else code
    bits = (magnitude + ((largest - top) << 3)) << 20
    values = torch.where(magnitude > 0, bits.view(FP32.dtype), 0.0)
    values = torch.where(largest == 255, torch.nan, values)
    return torch.where(code > 0x7F, -values, values) if signed else values
