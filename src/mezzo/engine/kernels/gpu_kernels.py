"""The Triton kernels themselves: a program works on one chunk of one tensor, reads it once and writes it once.

A chunk is processed in tiles, few enough elements for a thread's registers. A whole tile, of tensors that begin at
multiples of 16 bytes, is read and written 16 bytes at a time; the rest of a tensor, and a tensor that begins elsewhere, element by
element. Both paths are compiled into one kernel, which chooses by the addresses. ``storage`` defines the random bits and the 8-bit
moments; this file does the same arithmetic on FP32's bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mezzo.engine.kernels.storage import MOMENT_DTYPES
from mezzo.formats import BF16, FP16, FP32

TYPES = {FP32.dtype: tl.float32, FP16.dtype: tl.float16, BF16.dtype: tl.bfloat16, MOMENT_DTYPES["8bit"]: tl.uint8}
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


WEIGHTS, GRADIENTS, MASTERS, STEPS = FIRST, tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
TRUSTED = tl.constexpr(2.0**-100)
"""The smallest sum of FP32 squares that is as exact as its additions."""
MOMENTS = tl.constexpr(7)
"""The first of the rows of moments; as ``gpu`` lists them."""


@unspecialized
def square_kernel(
    table, chunks, partials, count, TYPE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, FEW: tl.constexpr
):
    """Write a chunk's sum of squares in FP64, of FP32 sums of ``FEW * BLOCK / TILE`` squares each.

    FP64 for every square would take longer than memory on GPUs with few units for it (T4, L4, GeForce). It is used only for chunks
    whose FP32 sums overflowed or may have lost squares that are too small; these are read again, from the cache. FP16's squares are
    exact in FP32.
    """
    column, first, size = place(table, chunks, count)
    gradient = tl.load(column + FIRST * count)
    num = extent(first, size, BLOCK)
    total = tl.zeros([TILE], tl.float32)
    for offset in range(0, num, TILE):
        g = read_tile(gradient, first + offset, size, TYPE, TILE).to(tl.float32)
        total += g * g
    partial = tl.sum(tl.sum(tl.reshape(total, (TILE // FEW, FEW)), axis=1).to(tl.float64))
    if TYPE != tl.float16:
        # Squares below 2**-149 are lost, at most a BLOCK of them: 2**-37 of such a sum. Neither holds for NaN.
        if (partial >= TRUSTED) & (partial < float("inf")):
            tl.store(partials + tl.program_id(0), partial)
        else:
            tl.store(partials + tl.program_id(0), _squares_in_fp64(gradient, first, size, num, TYPE, TILE // 4))
    else:
        tl.store(partials + tl.program_id(0), partial)


@triton.jit
def _squares_in_fp64(gradient, first, size, num, TYPE: tl.constexpr, TILE: tl.constexpr):
    # A chunk of zeros, such as embedding rows that no token of a batch used, needs no FP64.
    some = tl.zeros([TILE], tl.int32)
    for offset in range(0, num, TILE):
        g = read_tile(gradient, first + offset, size, TYPE, TILE).to(tl.float32)
        some = tl.where(g == 0, some, 1)
    partial = tl.zeros([], tl.float64)
    if tl.max(some) > 0:
        total = tl.zeros([TILE], tl.float64)
        for offset in range(0, num, TILE):
            g = read_tile(gradient, first + offset, size, TYPE, TILE).to(tl.float64)
            total += g * g
        partial = tl.sum(total)
    return partial


@unspecialized
def begin_kernel(table, found_inf, count, ADAMW: tl.constexpr, TILE: tl.constexpr):
    """Count an update of every tensor, and compute AdamW's bias corrections in FP64, which costs little here."""
    tensor = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column, there = table + HEAD + tensor, tensor < count
    steps = tl.load(column + STEPS * count, mask=there, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(steps, mask=there, other=0) + 1
    if tl.load(found_inf) == 0:
        tl.store(steps, step, mask=there)
    if ADAMW:
        exact = step.to(tl.float64)
        exact_settings = table.to(tl.pointer_type(tl.float64), bitcast=True)
        lr, log_beta1, log_beta2 = tl.load(exact_settings), tl.load(exact_settings + 1), tl.load(exact_settings + 2)
        corrections = (column + CORRECTIONS * count).to(tl.pointer_type(tl.float32), bitcast=True)
        tl.store(corrections, (lr / (1.0 - tl.exp(exact * log_beta1))).to(tl.float32), mask=there)
        tl.store(corrections + 1, tl.sqrt(1.0 - tl.exp(exact * log_beta2)).to(tl.float32), mask=there)


@unspecialized
def adamw_kernel(
    table, chunks, factor, found_inf, count,
    WEIGHT: tl.constexpr, GRADIENT: tl.constexpr, MOMENT: tl.constexpr, KIND: tl.constexpr, AMSGRAD: tl.constexpr,
    MOSTLY_OLD: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Update a chunk by AdamW; the settings are sign, lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2 and eps."""
    if tl.load(found_inf) == 0:
        column, first, size = place(table, chunks, count)
        settings = table.to(tl.pointer_type(tl.float32), bitcast=True) + 2 * EXACT
        weight, gradient = tl.load(column + WEIGHTS * count), tl.load(column + GRADIENTS * count)
        master, mean = tl.load(column + MASTERS * count), tl.load(column + MOMENTS * count)
        square = tl.load(column + (MOMENTS + 1) * count)
        largest = tl.load(column + (MOMENTS + 2) * count) if AMSGRAD else square
        aligned = ((weight | gradient | master | mean | square | largest) & 15) == 0
        for offset in range(0, extent(first, size, BLOCK), TILE):
            if aligned & (first + offset + TILE <= size):
                _adamw(
                    column, settings, count, factor, first + offset, size, weight, gradient, master, mean, square, largest,
                    WEIGHT, GRADIENT, MOMENT, KIND, AMSGRAD, MOSTLY_OLD, TILE, True,
                )  # fmt: skip
            else:
                _adamw(
                    column, settings, count, factor, first + offset, size, weight, gradient, master, mean, square, largest,
                    WEIGHT, GRADIENT, MOMENT, KIND, AMSGRAD, MOSTLY_OLD, TILE, False,
                )  # fmt: skip


@triton.jit
def _adamw(
    column, settings, count, factor, first, size, weight, gradient, master, mean, square, largest,
    WEIGHT: tl.constexpr, GRADIENT: tl.constexpr, MOMENT: tl.constexpr, KIND: tl.constexpr, AMSGRAD: tl.constexpr,
    MOSTLY_OLD: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    at = offsets(first, TILE)
    inside = at < size
    step = tl.load(tl.load(column + STEPS * count).to(tl.pointer_type(tl.float32)))
    h = hashed(tl.load(column + NUMBERS * count), step, at)
    corrections = (column + CORRECTIONS * count).to(tl.pointer_type(tl.float32), bitcast=True)
    length, root = tl.load(corrections), tl.load(corrections + 1)
    g = read(gradient, at, inside, GRADIENT, WHOLE).to(tl.float32) * (tl.load(factor) * tl.load(settings))
    m = read_moment(mean, size, first, at, inside, True, MOMENT, TILE, WHOLE)
    v = read_moment(square, size, first, at, inside, False, MOMENT, TILE, WHOLE)
    p = read_master(weight, master, at, inside, WEIGHT, KIND, WHOLE)
    # torch.lerp's two forms
    m = m + (g - m) * tl.load(settings + 3) if MOSTLY_OLD else g - (g - m) * tl.load(settings + 2)
    v = v * tl.load(settings + 4) + tl.load(settings + 5) * g * g
    write_moment(mean, size, first, at, inside, m, for_first(h), True, MOMENT, TILE, WHOLE)
    write_moment(square, size, first, at, inside, v, for_second(h), False, MOMENT, TILE, WHOLE)
    if AMSGRAD:
        v = tl.maximum(v, read_moment(largest, size, first, at, inside, False, MOMENT, TILE, WHOLE))
        write_moment(largest, size, first, at, inside, v, for_second(h), False, MOMENT, TILE, WHOLE)
    p -= tl.load(settings + 1) * p + length * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + tl.load(settings + 6))
    write_master(weight, master, at, inside, p, h, WEIGHT, KIND, WHOLE)


@unspecialized
def sgd_kernel(
    table, chunks, factor, found_inf, count,
    WEIGHT: tl.constexpr, GRADIENT: tl.constexpr, MOMENT: tl.constexpr, KIND: tl.constexpr, MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Update a chunk by SGD; the settings are sign, weight_decay, lr, momentum and 1 - dampening."""
    if tl.load(found_inf) == 0:
        column, first, size = place(table, chunks, count)
        settings = table.to(tl.pointer_type(tl.float32), bitcast=True) + 2 * EXACT
        weight, gradient = tl.load(column + WEIGHTS * count), tl.load(column + GRADIENTS * count)
        master, buffer = tl.load(column + MASTERS * count), tl.load(column + MOMENTS * count)
        aligned = ((weight | gradient | master | buffer) & 15) == 0
        for offset in range(0, extent(first, size, BLOCK), TILE):
            if aligned & (first + offset + TILE <= size):
                _sgd(
                    column, settings, count, factor, first + offset, size, weight, gradient, master, buffer,
                    WEIGHT, GRADIENT, MOMENT, KIND, MOMENTUM, NESTEROV, TILE, True,
                )  # fmt: skip
            else:
                _sgd(
                    column, settings, count, factor, first + offset, size, weight, gradient, master, buffer,
                    WEIGHT, GRADIENT, MOMENT, KIND, MOMENTUM, NESTEROV, TILE, False,
                )  # fmt: skip


@triton.jit
def _sgd(
    column, settings, count, factor, first, size, weight, gradient, master, buffer,
    WEIGHT: tl.constexpr, GRADIENT: tl.constexpr, MOMENT: tl.constexpr, KIND: tl.constexpr, MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    at = offsets(first, TILE)
    inside = at < size
    step = tl.load(tl.load(column + STEPS * count).to(tl.pointer_type(tl.float32)))
    h = hashed(tl.load(column + NUMBERS * count), step, at)
    p = read_master(weight, master, at, inside, WEIGHT, KIND, WHOLE)
    g = read(gradient, at, inside, GRADIENT, WHOLE).to(tl.float32) * (tl.load(factor) * tl.load(settings))
    g += tl.load(settings + 1) * p
    direction = g
    if MOMENTUM:
        b = read_moment(buffer, size, first, at, inside, True, MOMENT, TILE, WHOLE)
        b = tl.where(step == 1.0, g, tl.load(settings + 3) * b + tl.load(settings + 4) * g)
        write_moment(buffer, size, first, at, inside, b, for_first(h), True, MOMENT, TILE, WHOLE)
        direction = b
        if NESTEROV:
            direction = g + tl.load(settings + 3) * b
    write_master(weight, master, at, inside, p - tl.load(settings + 2) * direction, h, WEIGHT, KIND, WHOLE)


@unspecialized
def exponent_kernel(
    table,
    chunks,
    cuts,
    count,
    TYPE: tl.constexpr,
    CUTS: tl.constexpr,
    BINS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add the counts of a chunk to its tensor's table, ``PART`` bins at a time."""
    column, first, size = place(table, chunks, count)
    values = tl.load(column + FIRST * count)
    counted = tl.load(column + (FIRST + 1) * count).to(tl.pointer_type(tl.int64))
    for part in range(PARTS):
        counts = tl.zeros([PART], dtype=tl.int32)
        for offset in range(0, extent(first, size, BLOCK), TILE):
            value = read_tile(values, first + offset, size, TYPE, TILE).to(tl.float32)
            bins = _bins(value, cuts, CUTS, TILE) - part * PART
            here = (offsets(first + offset, TILE) < size) & (bins >= 0) & (bins < PART)
            counts += tl.histogram(bins, PART, mask=here)
        number = part * PART + tl.arange(0, PART)
        tl.atomic_add(counted + number, counts.to(tl.int64), mask=(number < BINS) & (counts > 0), sem="relaxed")


@triton.jit
def _bins(value, cuts, CUTS: tl.constexpr, TILE: tl.constexpr):
    plain = tl.abs(value).to(tl.int32, bitcast=True)
    # FP32's subnormals are made normal by whole numbers: a GPU may flush them in floating-point arithmetic.
    small = plain.to(tl.float32).to(tl.int32, bitcast=True) - (149 << 23)
    bits = tl.where(plain < (1 << 23), tl.where(plain == 0, -(127 << 23), small), plain)
    mantissa = bits & 0x7FFFFF
    cell = tl.zeros([TILE], dtype=tl.int32)
    for number in tl.static_range(CUTS):
        cell += (mantissa >= tl.load(cuts + number)).to(tl.int32)
    return tl.maximum((bits >> 23) + 23, 0) * (CUTS + 1) + cell
