"""Name the formats of what was counted by a framework's dtypes."""

from __future__ import annotations

from collections import Counter

from mezzo.formats import FORMATS, FP32, TF32


def by_format(by_dtype: Counter[str], *, tf32: bool) -> dict[str, int]:
    """Return counts by format from counts by dtype name; FP32 counts as TF32 if that is on."""
    names = {f.dtype_name: f.name for f in FORMATS.values() if f is not TF32}
    if tf32:
        names[FP32.dtype_name] = TF32.name
    return {names.get(dtype, dtype): flops for dtype, flops in by_dtype.items() if flops}
