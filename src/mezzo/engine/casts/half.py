"""The 16-bit dtypes of training."""

from __future__ import annotations

from mezzo.formats import BF16, FP16

HALF = (FP16.dtype, BF16.dtype)
