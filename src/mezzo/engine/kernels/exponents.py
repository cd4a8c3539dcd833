"""Count values by exponent, finely enough that a cast to a 16-bit or 8-bit format at any power-of-two scale follows from the counts.

A cast to a format rounds to nearest, ties to even. Whether a value becomes zero, a subnormal, a normal or an overflow depends on
where it lies between three magnitudes, and multiplying by a power of two moves a value's exponent and nothing else. So a row per
exponent is enough if it is cut where one of the formats may draw one of its lines:

    half the smallest subnormal   a power of two; the tie itself becomes zero, so exact powers of two are counted apart
    where the subnormals end      min_normal - min_subnormal / 2, whose mantissa is 2 - 2**-mantissa_bits
    where the overflow begins     max + half a unit in the last place; that tie goes to infinity where max is odd

That makes nine cells a row for the four formats. FP32's own subnormals have rows like any other number. A table is 279 rows of
nine cells of int64::

    row 0          zeros, in the first cell
    row 1 .. 277   magnitudes from 2**(row - 150) up to the next power of two
    row 278        infinities in the first cell, NaNs in the others

What is counted is the value in FP32: FP64 is rounded to it first. Limits: one magnitude a value, so signs are not kept.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from mezzo.engine.kernels import cpu
from mezzo.engine.kernels.layout import dense
from mezzo.formats import BF16, E4M3, E5M2, FP16, FP32, Format

FORMATS = (FP16, BF16, E4M3, E5M2)
_MANTISSA = FP32.mantissa_bits
ROWS = 279
FIRST_EXPONENT = -149
"""The exponent of row 1: FP32's smallest subnormal."""

_COUNTED = (FP32.dtype, FP16.dtype, BF16.dtype)

Count: TypeAlias = Callable[[Sequence[Tensor], Sequence[Tensor]], None]


def first_overflow(target: Format) -> tuple[int, int]:
    """Return exponent and mantissa bits (as FP32 has them) of the smallest magnitude that overflows ``target``."""
    exponent = target.max.hex().partition("p")[2]
    significand = int(target.max / 2.0 ** int(exponent) * 2**target.mantissa_bits)
    half_unit = 1 << (_MANTISSA - target.mantissa_bits - 1)
    mantissa = (significand << (_MANTISSA - target.mantissa_bits)) + half_unit - (1 << _MANTISSA)
    return int(exponent), mantissa if significand % 2 else mantissa + 1


def first_normal(target: Format) -> tuple[int, int]:
    """Return exponent and mantissa bits of the smallest magnitude that ``target`` rounds to a normal number."""
    return -target.bias, (1 << _MANTISSA) - (1 << (_MANTISSA - target.mantissa_bits))


CUTS = tuple(sorted({1} | {line(f)[1] for f in FORMATS for line in (first_overflow, first_normal)}))
"""The mantissas at which a row is cut: a value's cell is the number of cuts that are not above its mantissa."""
CELLS = len(CUTS) + 1
BINS = ROWS * CELLS


def bin_of(exponent: int, mantissa: int) -> int:
    """Return the bin of a magnitude, cut off at the table's ends: all bins below it hold smaller non-zero magnitudes."""
    row = exponent - FIRST_EXPONENT + 1
    if row < 1:
        return CELLS
    return min(row * CELLS + sum(cut <= mantissa for cut in CUTS), (ROWS - 1) * CELLS)


def tables(count: int, device: torch.device | str = "cpu") -> Tensor:
    """Return ``count`` empty tables."""
    return torch.zeros(count, BINS, dtype=torch.int64, device=device)


def add(tensors: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    """Count the elements of each tensor into its table, which lies on the same device; tensors may share a table."""
    own = [t if t.dtype in _COUNTED and t.is_contiguous() else _prepared(t) for t in tensors]
    if all(t.is_cpu for t in own):  # one call for all costs less than to look at every device
        counter("cpu")[0](own, rows)
        return
    for device_type in dict.fromkeys(t.device.type for t in own):
        places = [i for i, t in enumerate(own) if t.device.type == device_type]
        counter(device_type)[0]([own[i] for i in places], [rows[i] for i in places])


def _prepared(tensor: Tensor) -> Tensor:
    values = tensor.detach()
    return dense(values if values.dtype in _COUNTED else values.float())


@functools.cache
def counter(device_type: str) -> tuple[Count, str]:
    """Return what counts on torch's device type, and why."""
    if device_type == "cpu":
        lib, reason = cpu.library()
        return (_compiled, reason) if lib is not None else (reference, f"plain torch operations: {reason}")
    if device_type == "cuda":
        if torch.cuda.get_device_capability() < (7, 0) and torch.version.hip is None:
            return reference, "plain torch operations: the Triton kernel needs compute capability 7.0"
        try:
            kernels = importlib.import_module("mezzo.engine.kernels.gpu_exponents")
            kernels.count(
                [torch.ones(1, device="cuda")], [tables(1, "cuda")[0]]
            )  # a Triton that cannot compile shows here
        except Exception as error:  # whatever its compiler raises
            return reference, f"plain torch operations: Triton does not work here ({type(error).__name__}: {error})"
        return kernels.count, "a Triton kernel, one launch for all tensors of a format"
    return reference, f"plain torch operations: no kernel of our own for {device_type}"


def reference(tensors: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    """Count as the module says, in plain torch operations: what the kernels are tested against."""
    cuts = {}
    for tensor, row in zip(tensors, rows, strict=True):
        if tensor.device not in cuts:
            cuts[tensor.device] = torch.tensor(CUTS, dtype=torch.int32, device=tensor.device)
        magnitude = tensor.detach().reshape(-1).float().abs()
        bits = magnitude.view(torch.int32)
        # FP32's subnormals are made normal by a shift of 24 places, which their row takes out again; zero ends below row 0.
        raised = (magnitude * 2.0**24).view(torch.int32) - (24 << _MANTISSA)
        bits = torch.where(bits < 1 << _MANTISSA, raised, bits)
        cell = torch.bucketize(bits & (1 << _MANTISSA) - 1, cuts[tensor.device], out_int32=True, right=True)
        place = ((bits >> _MANTISSA) + 23).clamp_(min=0) * CELLS + cell
        row += torch.bincount(place, minlength=BINS)


def _compiled(tensors: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    cpu.exponents(tensors, rows, CUTS)
