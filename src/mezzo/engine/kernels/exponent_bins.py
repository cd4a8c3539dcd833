"""Count values by exponent, finely enough that a cast to a 16-bit or 8-bit format at any power-of-two scale follows from the counts.

A cast to a format rounds to nearest, ties to even. Whether a value becomes zero, a subnormal, a normal or an overflow depends on
its position between three magnitudes, and multiplying by a power of two changes only a value's exponent. So a row per exponent is
enough if it is cut at the mantissas of these magnitudes:

    half the smallest subnormal   a power of two; the tie itself becomes zero, so exact powers of two are counted separately
    the end of the subnormals     min_normal - min_subnormal / 2, whose mantissa is 2 - 2**-mantissa_bits
    the beginning of overflow     max + half a unit in the last place; that tie becomes infinity if max is odd

That makes nine cells per row for the four formats. FP32's own subnormals have rows like any other number. A table is 279 rows of
nine cells of int64::

    row 0          zeros, in the first cell
    row 1 .. 277   magnitudes from 2**(row - 150) up to the next power of two
    row 278        infinities in the first cell, NaNs in the others

Values are counted in FP32: FP64 is rounded to it first. Limits: only magnitudes are counted, not signs.
"""

from __future__ import annotations

from mezzo.formats import BF16, E4M3, E5M2, FP16, FP32, Format

BINNED_FORMATS = (FP16, BF16, E4M3, E5M2)
_MANTISSA = FP32.mantissa_bits
ROWS = 279
FIRST_EXPONENT = -149
"""The exponent of row 1: FP32's smallest subnormal."""


def first_overflow(target: Format) -> tuple[int, int]:
    """Return exponent and mantissa bits (in FP32's encoding) of the smallest magnitude that overflows ``target``."""
    exponent = target.max.hex().partition("p")[2]
    significand = int(target.max / 2.0 ** int(exponent) * 2**target.mantissa_bits)
    half_unit = 1 << (_MANTISSA - target.mantissa_bits - 1)
    mantissa = (significand << (_MANTISSA - target.mantissa_bits)) + half_unit - (1 << _MANTISSA)
    return int(exponent), mantissa if significand % 2 else mantissa + 1


def first_normal(target: Format) -> tuple[int, int]:
    """Return exponent and mantissa bits of the smallest magnitude that ``target`` rounds to a normal number."""
    return -target.bias, (1 << _MANTISSA) - (1 << (_MANTISSA - target.mantissa_bits))


CUTS = tuple(sorted({1} | {line(f)[1] for f in BINNED_FORMATS for line in (first_overflow, first_normal)}))
"""The mantissas at which a row is cut: a value's cell is the number of cuts up to its mantissa."""
CELLS = len(CUTS) + 1
BINS = ROWS * CELLS


def bin_of(exponent: int, mantissa: int) -> int:
    """Return the bin of a magnitude, clamped to the table: all bins below it count smaller non-zero magnitudes."""
    row = exponent - FIRST_EXPONENT + 1
    if row < 1:
        return CELLS
    return min(row * CELLS + sum(cut <= mantissa for cut in CUTS), (ROWS - 1) * CELLS)
