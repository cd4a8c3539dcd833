"""How Triton programs find their tensors, and the formats of weights, gradients and moments in memory.

``noise`` and ``eight_bit`` define the random bits and the 8-bit moments; this file does the same arithmetic on FP32's bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mezzo.engine.kernels.moments import KINDS
from mezzo.formats import BF16, FP16, FP32

TYPES = {FP32.dtype: tl.float32, FP16.dtype: tl.float16, BF16.dtype: tl.bfloat16, KINDS["8bit"]: tl.uint8}
"""Triton's types of the formats in memory."""
# A table of int64: the group's settings, then rows of one entry per tensor. ``gpu.LaunchTable`` lays it out.
HEAD = tl.constexpr(8)
EXACT = tl.constexpr(3)
"""Settings at the head that are FP64; FP32 ones follow."""
SIZES, NUMBERS, CORRECTIONS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
FIRST = tl.constexpr(3)
"""The first of the rows that contain addresses."""

unspecialized = triton.jit(
    # One binary for any memory: a second one would be compiled and loaded in the middle of training, or of a capture.
    do_not_specialize=["count"],
    do_not_specialize_on_alignment=["table", "chunks", "factor", "found_inf", "partials", "cuts"],
)
"""Compile a kernel once for each set of constants."""


@triton.jit
def place(table, chunks, count):
    """Return where this program's tensor has its entry in the first row, the first element to work on, and the tensor's size."""
    chunk = chunks + 2 * tl.program_id(0)
    column = table + HEAD + tl.load(chunk)
    return column, tl.load(chunk + 1), tl.load(column + SIZES * count)


@triton.jit
def extent(first, size, BLOCK: tl.constexpr):
    """Return how many of a chunk's elements exist."""
    return tl.minimum(size - first, BLOCK).to(tl.int32)


@triton.jit
def offsets(first, TILE: tl.constexpr):
    """Return the places of a tile's elements in their tensor."""
    return tl.max_contiguous(tl.multiple_of(first + tl.arange(0, TILE).to(tl.int64), TILE), TILE)


@triton.jit
def read(address, at, inside, TYPE: tl.constexpr, WHOLE: tl.constexpr):
    """Return elements of the tensor at ``address``: a whole tile 16 bytes at a time, otherwise only those ``inside`` the tensor."""
    pointer = address.to(tl.pointer_type(TYPE))
    if WHOLE:
        return tl.load(tl.multiple_of(pointer, 16) + at)
    else:
        return tl.load(pointer + at, mask=inside, other=0)


@triton.jit
def read_tile(address, first, size, TYPE: tl.constexpr, TILE: tl.constexpr):
    """Return a tile of the tensor at ``address``, 16 bytes at a time if its address allows; 0 beyond the tensor's end."""
    at = offsets(first, TILE)
    if (address % 16 == 0) & (first + TILE <= size):
        value = read(address, at, at < size, TYPE, True)
    else:
        value = read(address, at, at < size, TYPE, False)
    return value


@triton.jit
def _put(address, at, inside, value, TYPE: tl.constexpr, WHOLE: tl.constexpr):
    pointer = address.to(tl.pointer_type(TYPE))
    if WHOLE:
        tl.store(tl.multiple_of(pointer, 16) + at, value)
    else:
        tl.store(pointer + at, value, mask=inside)


@triton.jit
def _to_bf16(value):
    bits = value.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(nan, (bits >> 16) | 0x40, rounded).to(tl.int16)


@triton.jit
def write(address, at, inside, value, TYPE: tl.constexpr, WHOLE: tl.constexpr):
    """Write elements of the tensor at ``address``, rounded to nearest."""
    if TYPE == tl.bfloat16:  # spelled out: Triton's interpreter cuts FP32 off instead of rounding it
        _put(address, at, inside, _to_bf16(value), tl.int16, WHOLE)
    else:
        _put(address, at, inside, value.to(TYPE), TYPE, WHOLE)


@triton.jit
def mix(x):
    """Return the hash of ``noise.mix``."""
    x = (x ^ (x >> 16)) * tl.full([], 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full([], 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def hashed(number, step, at):
    """Return 32 random bits for every element; ``for_weight``, ``for_first`` and ``for_second`` extract theirs from these."""
    seed = mix(mix(step.to(tl.uint32)) + number.to(tl.uint32) * tl.full([], 0x9E3779B9, tl.uint32))
    return mix(at.to(tl.uint32) + seed)


@triton.jit
def for_weight(h):
    """Return a weight's 16 random bits."""
    return (h & 0xFFFF).to(tl.int32)


@triton.jit
def for_first(h):
    """Return a first moment's 16 random bits."""
    return (h >> 16).to(tl.int32)


@triton.jit
def for_second(h):
    """Return a second moment's 16 random bits."""
    return ((h * tl.full([], 0x9E3779B1, tl.uint32)) >> 16).to(tl.int32)


@triton.jit
def _to_bf16_by(value, bits16):
    bits = value.to(tl.int32, bitcast=True)
    finite = (bits & 0x7FFFFFFF) < 0x7F800000
    return tl.where(finite, ((bits + bits16) >> 16).to(tl.int16), _to_bf16(value))


@triton.jit
def read_master(weight, master, at, inside, TYPE: tl.constexpr, KIND: tl.constexpr, WHOLE: tl.constexpr):
    """Return FP32 weights: KIND 1 has an FP32 master, 2 the low bits of one, 0 and 3 none."""
    if KIND == 1:
        return read(master, at, inside, tl.float32, WHOLE)
    elif KIND == 2:
        low = read(master, at, inside, tl.int16, WHOLE)
        high = read(weight, at, inside, tl.int16, WHOLE).to(tl.int32) - (low < 0).to(tl.int32)
        return ((high << 16) | (low.to(tl.int32) & 0xFFFF)).to(tl.float32, bitcast=True)
    else:
        return read(weight, at, inside, TYPE, WHOLE).to(tl.float32)


@triton.jit
def write_master(weight, master, at, inside, value, h, TYPE: tl.constexpr, KIND: tl.constexpr, WHOLE: tl.constexpr):
    """Write FP32 weights back; KIND 3 is BF16 without a master, rounded stochastically."""
    if KIND == 2:
        bits = value.to(tl.int32, bitcast=True)
        low = bits.to(tl.int16)
        high = (bits >> 16) + (low < 0).to(tl.int32)
        write(weight, at, inside, high, tl.int16, WHOLE)
        write(master, at, inside, low, tl.int16, WHOLE)
    elif KIND == 3:
        write(weight, at, inside, _to_bf16_by(value, for_weight(h)), tl.int16, WHOLE)
    else:
        if KIND == 1:
            write(master, at, inside, value, tl.float32, WHOLE)
        write(weight, at, inside, value, TYPE, WHOLE)


@triton.jit
def _exponents(moment, size, first, TILE: tl.constexpr):
    """Return where the exponents of a tile's blocks lie, behind the tensor's codes, and which of them exist."""
    block = first // 128 + tl.arange(0, TILE // 128)
    return (moment + size).to(tl.pointer_type(tl.uint8)) + block, block * 128 < size


@triton.jit
def _spread(of_blocks, TILE: tl.constexpr):
    """Return every element's value in ``of_blocks``, which has one value per block."""
    BLOCKS: tl.constexpr = TILE // 128
    return tl.reshape(tl.broadcast_to(of_blocks[:, None], (BLOCKS, 128)), (TILE,))


@triton.jit
def read_moment(
    moment, size, first, at, inside, SIGNED: tl.constexpr, TYPE: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr
):
    """Return a moment in FP32; ``TYPE`` uint8 is a packed one."""
    if TYPE == tl.uint8:
        TOP: tl.constexpr = 15 if SIGNED else 31
        code = read(moment, at, inside, tl.uint8, WHOLE).to(tl.int32)
        pointers, there = _exponents(moment, size, first, TILE)
        largest = _spread(tl.load(pointers, mask=there, other=0).to(tl.int32), TILE)
        magnitude = code & 0x7F if SIGNED else code
        bits = tl.where(magnitude > 0, (magnitude + ((largest - TOP) << 3)) << 20, 0)
        bits = tl.where(largest == 255, 0x7FC00000, bits)
        value = bits.to(tl.float32, bitcast=True)
        if SIGNED:
            value = tl.where(code > 0x7F, -value, value)
        return value
    else:
        return read(moment, at, inside, TYPE, WHOLE).to(tl.float32)


@triton.jit
def write_moment(
    moment,
    size,
    first,
    at,
    inside,
    value,
    bits16,
    SIGNED: tl.constexpr,
    TYPE: tl.constexpr,
    TILE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Write a moment back; formats below FP32 are rounded stochastically."""
    if TYPE == tl.uint8:
        TOP: tl.constexpr = 15 if SIGNED else 31
        FLOOR: tl.constexpr = 40 if SIGNED else 64
        bits = value.to(tl.int32, bitcast=True)
        magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x7F800000)
        rounded = (magnitude + (bits16 << 4)) >> 20
        largest = tl.maximum(tl.max(tl.reshape(rounded, (TILE // 128, 128)), axis=1) >> 3, FLOOR)
        reach = _spread(largest, TILE) - TOP
        code = rounded - (reach << 3)
        if SIGNED:
            smallest = (reach + 1) << 23
            chance = bits16.to(tl.float32) * (smallest.to(tl.float32, bitcast=True) * 1.52587890625e-05)  # 2**-16
            code = tl.where(magnitude >= smallest, code, tl.where(tl.abs(value) > chance, 8, 0))
            code = code | ((bits >> 24) & 0x80)
        else:
            code = tl.where(magnitude > 0, tl.maximum(code, 8), 0)
        write(moment, at, inside, code, tl.uint8, WHOLE)
        pointers, there = _exponents(moment, size, first, TILE)
        tl.store(pointers, largest.to(tl.uint8), mask=there)
    elif TYPE == tl.bfloat16:
        write(moment, at, inside, _to_bf16_by(value, bits16), tl.int16, WHOLE)
    else:
        write(moment, at, inside, value, TYPE, WHOLE)
