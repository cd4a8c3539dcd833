"""The dtypes of 16 bits that training computes in."""

from __future__ import annotations

from mezzo.formats import BF16, FP16

HALF = (FP16.dtype, BF16.dtype)
