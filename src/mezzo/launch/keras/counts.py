"""FLOPs by format, from counts by a framework's dtypes."""

from __future__ import annotations

from collections import Counter

from mezzo.formats import FORMAT_NAMES, FP32, TF32


def by_format(by_dtype: Counter[str], *, tf32: bool) -> dict[str, int]:
    """Return counts by format from counts by dtype name; FP32 counts as TF32 if that is on."""
    names = FORMAT_NAMES | ({FP32.dtype_name: TF32.name} if tf32 else {})
    return {names.get(dtype, dtype): flops for dtype, flops in by_dtype.items() if flops}
