"""How an optimizer's tensors lie in memory between updates: in which layout, in how few bits, rounded how.

A value between two numbers of a format is rounded up with a probability equal to its position between them: nothing is lost on
average, whereas rounding to nearest loses every change below half a step each time (Gupta et al., arXiv:1502.02551). The bits of
element ``i`` of parameter ``number`` at update ``step``::

    h = mix(i + mix(mix(step) + number * 0x9E3779B9))     32 bits; mix is Wellons' "lowbias32"
    weight:         h        & 0xFFFF
    first moment:   h >> 16
    second moment:  (h * 0x9E3779B1 mod 2**32) >> 16

So the kernels of every device round alike regardless of their threads, a resumed run continues bit for bit, replicas in
several processes agree without communication, and torch's generators are not used.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mezzo.errors import SessionError
from mezzo.formats import BF16, FP32

MOMENT_DTYPES = {"fp32": FP32.dtype, "bf16": BF16.dtype, "8bit": torch.uint8}
"""Users' names of the formats, and the dtype that stores each."""
SECOND_STREAM = ("exp_avg_sq", "max_exp_avg_sq", "col_var", "variance")
"""The moments that are rounded by the second moment's bits; all others by the first's."""
UNSIGNED = (*SECOND_STREAM, "row_var")
"""The moments that are never below 0."""
_HALF = 0x8000


def flat(tensor: Tensor) -> Tensor:
    """Return a tensor without gaps as one row, in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def zero_moment(kind: str, parameter: Tensor) -> Tensor:
    """Return a moment of zeros for ``parameter``."""
    if kind == "8bit":
        return torch.zeros(packed_bytes(parameter.numel()), dtype=torch.uint8, device=parameter.device)
    return torch.zeros_like(parameter, dtype=MOMENT_DTYPES[kind], memory_format=torch.preserve_format)


def flat_fp32(kept: Tensor, count: int, *, signed: bool) -> Tensor:
    """Return a moment of ``count`` elements as flat FP32; an FP32 one itself, without a copy."""
    return unpack(kept, count, signed=signed) if kept.dtype is torch.uint8 else flat(kept).float()


def rounded(values: Tensor, kind: torch.dtype, noise: Tensor, *, signed: bool) -> Tensor:
    """Return flat FP32 ``values`` in a format of ``MOMENT_DTYPES``, rounded by ``noise``."""
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
    stored = rounded(flat(values), MOMENT_DTYPES[kind], nearest, signed=signed)
    return stored if kind == "8bit" else stored.as_strided(values.shape, values.stride())


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


def values_in(kept: Tensor) -> int:
    """Return the number of elements of a moment, which may be packed."""
    count = kept.numel()
    return count - -(-count // (BLOCK + 1)) if kept.dtype is torch.uint8 else count


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


GOLDEN, SECOND = 0x9E3779B9, 0x9E3779B1
_LOW32 = 0xFFFFFFFF


def mix(x: Tensor) -> Tensor:
    """Return the hash of 32-bit numbers, in int64 tensors."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW32
    return x ^ (x >> 16)


def streams(count: int, number: int, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return 16 random bits for each of ``count`` elements: for the weight, its first moment and its second.

    Args:
        count: number of elements of the parameter, in the order of its memory.
        number: the parameter's number in its optimizer.
        step: the number of the update: FP32, no dimensions.
    """
    seed = mix((mix(step.long()) + number * GOLDEN) & _LOW32)
    h = mix((torch.arange(count, device=step.device) + seed) & _LOW32)
    return h & 0xFFFF, h >> 16, ((h * SECOND) & _LOW32) >> 16


def round_to_bf16(values: Tensor, noise: Tensor) -> Tensor:
    """Round FP32 values stochastically to BF16; non-finite values stay as they are."""
    bits = values.view(torch.int32) + noise.int()
    # The noise carries into the upper half as often as the lower half is large.
    rounded = (bits >> 16).to(torch.int16).view(BF16.dtype)
    return torch.where(values.isfinite(), rounded, values.to(BF16.dtype))


def has_gaps(tensor: Tensor) -> bool:
    """Return whether a tensor's elements do not fill one contiguous stretch of memory without overlap."""
    return not (tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor))


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient that fills one stretch of memory: itself if it does.

    Raises:
        SessionError: the gradient is sparse.
    """
    if gradient.layout is not torch.strided:
        raise SessionError(
            f"a gradient of shape {tuple(gradient.shape)} is {gradient.layout}; allowed: dense gradients",
            hint="build the embedding with sparse=False, or use torch.optim.SparseAdam for it",
        )
    if gradient.is_contiguous():  # called for every gradient of every update
        return gradient
    return gradient.contiguous() if has_gaps(gradient) else gradient


def laid_out_as(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return ``tensor`` with the strides of ``parameter``, which has no gaps: itself if it has them."""
    if tensor.stride() == parameter.stride():
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)


def gradient_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient with the strides of ``parameter``, which has no gaps: itself if it has them.

    Raises:
        SessionError: the gradient is sparse.
    """
    if gradient.layout is torch.strided and gradient.stride() == parameter.stride():
        return gradient
    return laid_out_as(parameter, dense(gradient))


def refuse_gaps(parameter: Tensor) -> None:
    """Refuse a weight whose elements do not fill one stretch of memory."""
    if has_gaps(parameter):
        raise SessionError(
            f"a parameter of shape {tuple(parameter.shape)} has strides {parameter.stride()}; "
            "allowed: weights that fill one stretch of memory",
            hint="give it memory of its own: parameter.data = parameter.data.contiguous()",
        )


# The BF16 weight is the FP32 master rounded to nearest, ties away from zero: its bits are the master's upper 16, plus
# one if the top low bit is set. So the low bits show whether to subtract it again. Only ties differ from
# torch's rounding (to even): about 6 in a million values. The idea is Split-SGD's (Intel Extension for PyTorch);
# TransformerEngine calls the low bits "param remainders".
def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return an FP32 tensor as its BF16 weight and int16 low bits."""
    bits = master.view(torch.int32)
    low = bits.to(torch.int16)  # keeps the low 16 bits
    high = (bits >> 16) + (low < 0).int()
    return high.to(torch.int16).view(BF16.dtype), low


def join(weight: Tensor, low: Tensor) -> Tensor:
    """Return the FP32 tensor from which ``split`` made these."""
    high = weight.view(torch.int16).to(torch.int32) - (low < 0).int()
    return ((high << 16) | (low.to(torch.int32) & 0xFFFF)).view(FP32.dtype)
