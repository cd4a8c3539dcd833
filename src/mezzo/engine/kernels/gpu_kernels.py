"""The Triton kernels themselves: a program works on one chunk of one tensor, reads it once and writes it once.

A chunk is processed in tiles, few enough elements for a thread's registers. A whole tile, of tensors that begin at
multiples of 16 bytes, is read and written 16 bytes at a time; the rest of a tensor, and a tensor that begins elsewhere, element by
element. Both paths are compiled into one kernel, which chooses by the addresses.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mezzo.engine.kernels.gpu_formats import (
    CORRECTIONS,
    EXACT,
    FIRST,
    HEAD,
    NUMBERS,
    extent,
    for_first,
    for_second,
    hashed,
    offsets,
    place,
    read,
    read_master,
    read_moment,
    read_tile,
    unspecialized,
    write_master,
    write_moment,
)

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
