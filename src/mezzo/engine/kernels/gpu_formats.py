"""How the Triton kernels find their place, and the formats in which weights, gradients and moments lie in memory.

``noise`` and ``eightbit`` say what the random bits and the 8-bit moments are; here is the same arithmetic on FP32's bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place(chunks, sizes, BLOCK: tl.constexpr):
    """Return this program's tensor, its element offsets in it, and which of them exist."""
    program = tl.program_id(0)
    tensor = tl.load(chunks + 2 * program)
    at = tl.load(chunks + 2 * program + 1) + tl.arange(0, BLOCK).to(tl.int64)
    return tensor, at, at < tl.load(sizes + tensor)


@triton.jit
def read(addresses, tensor, at, inside, TYPE: tl.constexpr):
    """Return elements of one of the tensors."""
    pointer = tl.load(addresses + tensor).to(tl.pointer_type(TYPE))
    return tl.load(pointer + at, mask=inside, other=0)


@triton.jit
def _to_bf16(value):
    bits = value.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(nan, (bits >> 16) | 0x40, rounded).to(tl.int16)


@triton.jit
def write(addresses, tensor, at, inside, value, TYPE: tl.constexpr):
    """Write elements of one of the tensors, rounded to nearest."""
    if TYPE == tl.bfloat16:  # spelled out: Triton's interpreter cuts FP32 off instead of rounding it
        pointer = tl.load(addresses + tensor).to(tl.pointer_type(tl.int16))
        tl.store(pointer + at, _to_bf16(value), mask=inside)
    else:
        pointer = tl.load(addresses + tensor).to(tl.pointer_type(TYPE))
        tl.store(pointer + at, value.to(TYPE), mask=inside)


@triton.jit
def setting(settings, number: tl.constexpr):
    """Return one of the group's settings, which travel as the bits of FP64 numbers."""
    return tl.load(settings + number).to(tl.float64, bitcast=True)


@triton.jit
def mix(x):
    """Return the hash of ``noise.mix``."""
    x = (x ^ (x >> 16)) * tl.full([], 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full([], 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def hashed(numbers, tensor, step, at):
    """Return 32 random bits for every element; ``for_weight``, ``for_first`` and ``for_second`` take theirs out of them."""
    number = tl.load(numbers + tensor).to(tl.uint32)
    seed = mix(mix(step.to(tl.uint32)) + number * tl.full([], 0x9E3779B9, tl.uint32))
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
def open_master(weights, masters, tensor, at, inside, TYPE: tl.constexpr, KIND: tl.constexpr):
    """Return FP32 weights: KIND 1 has an FP32 master, 2 the low bits of one, 0 and 3 none."""
    if KIND == 1:
        return read(masters, tensor, at, inside, tl.float32)
    elif KIND == 2:
        low = read(masters, tensor, at, inside, tl.int16)
        high = read(weights, tensor, at, inside, tl.int16).to(tl.int32) - (low < 0).to(tl.int32)
        return ((high << 16) | (low.to(tl.int32) & 0xFFFF)).to(tl.float32, bitcast=True)
    else:
        return read(weights, tensor, at, inside, TYPE).to(tl.float32)


@triton.jit
def close_master(weights, masters, tensor, at, inside, value, h, TYPE: tl.constexpr, KIND: tl.constexpr):
    """Write FP32 weights back; KIND 3 is BF16 without a master, rounded stochastically."""
    if KIND == 2:
        bits = value.to(tl.int32, bitcast=True)
        low = bits.to(tl.int16)
        high = (bits >> 16) + (low < 0).to(tl.int32)
        write(weights, tensor, at, inside, high, tl.int16)
        write(masters, tensor, at, inside, low, tl.int16)
    elif KIND == 3:
        write(weights, tensor, at, inside, _to_bf16_by(value, for_weight(h)), tl.int16)
    else:
        if KIND == 1:
            write(masters, tensor, at, inside, value, tl.float32)
        write(weights, tensor, at, inside, value, TYPE)


@triton.jit
def open_moment(moments, sizes, tensor, at, inside, SIGNED: tl.constexpr, TYPE: tl.constexpr):
    """Return a moment in FP32; ``TYPE`` uint8 is a packed one."""
    if TYPE == tl.uint8:
        TOP: tl.constexpr = 15 if SIGNED else 31
        code = read(moments, tensor, at, inside, tl.uint8).to(tl.int32)
        largest = read(moments, tensor, tl.load(sizes + tensor) + at // 128, inside, tl.uint8).to(tl.int32)
        magnitude = code & 0x7F if SIGNED else code
        bits = tl.where(magnitude > 0, (magnitude + ((largest - TOP) << 3)) << 20, 0)
        bits = tl.where(largest == 255, 0x7FC00000, bits)
        value = bits.to(tl.float32, bitcast=True)
        if SIGNED:
            value = tl.where(code > 0x7F, -value, value)
        return value
    else:
        return read(moments, tensor, at, inside, TYPE).to(tl.float32)


@triton.jit
def close_moment(
    moments, sizes, tensor, at, inside, value, bits16, SIGNED: tl.constexpr, TYPE: tl.constexpr, BLOCK: tl.constexpr
):
    """Write a moment back, below FP32 stochastically rounded."""
    if TYPE == tl.uint8:
        TOP: tl.constexpr = 15 if SIGNED else 31
        FLOOR: tl.constexpr = 40 if SIGNED else 64
        ROWS: tl.constexpr = BLOCK // 128
        bits = value.to(tl.int32, bitcast=True)
        magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x7F800000)
        rounded = (magnitude + (bits16 << 4)) >> 20
        largest = tl.maximum(tl.max(tl.reshape(rounded, (ROWS, 128)), axis=1) >> 3, FLOOR)
        reach = tl.reshape(tl.broadcast_to(largest[:, None], (ROWS, 128)), (BLOCK,)) - TOP
        code = rounded - (reach << 3)
        if SIGNED:
            smallest = (reach + 1) << 23
            chance = bits16.to(tl.float32) * (smallest.to(tl.float32, bitcast=True) * 1.52587890625e-05)  # 2**-16
            code = tl.where(magnitude >= smallest, code, tl.where(tl.abs(value) > chance, 8, 0))
            code = code | ((bits >> 24) & 0x80)
        else:
            code = tl.where(magnitude > 0, tl.maximum(code, 8), 0)
        write(moments, tensor, at, inside, code, tl.uint8)
        size = tl.load(sizes + tensor)
        row = tl.min(at, axis=0) // 128 + tl.arange(0, ROWS)
        write(moments, tensor, size + row, row * 128 < size, largest, tl.uint8)
    elif TYPE == tl.bfloat16:
        write(moments, tensor, at, inside, _to_bf16_by(value, bits16), tl.int16)
    else:
        write(moments, tensor, at, inside, value, TYPE)
