"""Triton kernels that count by exponent, in the cells of ``exponent_bins``: one launch for all tensors of a format.

A program counts its chunk in shared memory and adds the counts to the tensor's table, so even the most frequent bin
costs one atomic addition per chunk. Tested under Triton's interpreter.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mezzo.engine.kernels.exponent_bins import BINS, CUTS
from mezzo.engine.kernels.gpu import CHUNK, LaunchTables, on, table_of
from mezzo.engine.kernels.gpu_formats import FIRST, TYPES, extent, offsets, place, read_tile, unspecialized

# Triton before 3.8 counts in registers, a warp's bins in its 32 threads: 512 bins fit, so the chunk is read five times, from the cache.
# Later ones count in shared memory, all bins at once. A part is a power of two.
_PARTS, _PART_BINS = (1, 4096) if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8) else (5, 512)
assert _PARTS * _PART_BINS >= BINS
_TILE = 1024
_WARPS = 8


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


@functools.cache
def _cuts(device: torch.device) -> Tensor:
    return torch.tensor(CUTS, dtype=torch.int32, device=device)


def count(tensors: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    """Count the elements of dense tensors into their tables, like ``exponents.reference``."""
    kinds = dict.fromkeys((t.dtype, t.device) for t in tensors if t.numel())
    for dtype, device in kinds:
        alike = [
            (t, r) for t, r in zip(tensors, rows, strict=True) if t.numel() and (t.dtype, t.device) == (dtype, device)
        ]
        # No table is kept: the tensors are others each time.
        table = table_of([[t for t, _ in alike], [r for _, r in alike]], kept=LaunchTables(1))
        compiled_in = {"TYPE": TYPES[dtype], "CUTS": len(CUTS), "BINS": BINS, "BLOCK": CHUNK}
        with on(device):
            exponent_kernel[(table.programs,)](
                table.memory,
                table.chunks,
                _cuts(device),
                table.count,
                **compiled_in,
                PARTS=_PARTS,
                PART=_PART_BINS,
                TILE=_TILE,
                num_warps=_WARPS,
                enable_fp_fusion=True,
            )
