"""The Triton way to count by exponent: ``exponents`` says what a cell is; one launch for all tensors of a format.

A program counts its chunk in shared memory and adds what it found to the tensor's table, so a bin that most values
fall into costs one atomic addition a chunk. Tested under Triton's interpreter.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mezzo.engine.kernels import exponents
from mezzo.engine.kernels.gpu import _TYPES, CHUNK, Table
from mezzo.engine.kernels.gpu_formats import place, read

_LOCAL_BINS = 4096  # a power of two with room for the table; what lies beyond it are places outside the tensor


@triton.jit
def exponent_kernel(
    tensors,
    tables,
    sizes,
    chunks,
    cuts,
    TYPE: tl.constexpr,
    CUTS: tl.constexpr,
    BINS: tl.constexpr,
    LOCAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the counts of a chunk to its tensor's table."""
    tensor, at, inside = place(chunks, sizes, BLOCK)
    magnitude = tl.abs(read(tensors, tensor, at, inside, TYPE).to(tl.float32))
    plain = magnitude.to(tl.int32, bitcast=True)
    # FP32's subnormals are made normal by whole numbers: a GPU may flush them in floating-point arithmetic.
    small = plain.to(tl.float32).to(tl.int32, bitcast=True) - (149 << 23)
    bits = tl.where(plain < (1 << 23), tl.where(plain == 0, -(127 << 23), small), plain)
    mantissa = bits & 0x7FFFFF
    row = tl.maximum((bits >> 23) + 23, 0)
    cell = tl.zeros([BLOCK], dtype=tl.int32)
    for number in tl.static_range(CUTS):
        cell += (mantissa >= tl.load(cuts + number)).to(tl.int32)
    where = tl.where(inside, row * (CUTS + 1) + cell, LOCAL - 1)
    counts = tl.histogram(where, LOCAL)
    bins = tl.arange(0, LOCAL)
    table = tl.load(tables + tensor).to(tl.pointer_type(tl.int64))
    tl.atomic_add(table + bins, counts.to(tl.int64), mask=(bins < BINS) & (counts > 0), sem="relaxed")


@functools.cache
def _cuts(device: torch.device) -> Tensor:
    return torch.tensor(exponents.CUTS, dtype=torch.int32, device=device)


def count(tensors: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    """Count the elements of dense tensors into their tables as ``exponents.reference`` does."""
    kinds = dict.fromkeys((t.dtype, t.device) for t in tensors if t.numel())
    for dtype, device in kinds:
        own = [
            (t, r) for t, r in zip(tensors, rows, strict=True) if t.numel() and (t.dtype, t.device) == (dtype, device)
        ]
        table = Table([[t for t, _ in own], [r for _, r in own]], [0] * len(own), None)
        table.send()
        exponent_kernel[(table.programs,)](
            table.addresses[0],
            table.addresses[1],
            table.sizes,
            table.chunks,
            _cuts(device),
            TYPE=_TYPES[dtype],
            CUTS=len(exponents.CUTS),
            BINS=exponents.BINS,
            LOCAL=_LOCAL_BINS,
            BLOCK=CHUNK,
        )
