"""The values of a Paddle tensor, and what they lose at the ends of a format's range."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mezzo.formats import FORMAT_NAMES, FORMATS, FP32, Format
from mezzo.records import Operand


class Survey(NamedTuple):
    """The largest value of a tensor, and what a format loses of its values."""

    largest: float
    """The largest magnitude; not finite if any value is not."""
    overflows: bool
    """Whether a finite value is beyond the format's range."""
    vanished: float = 0.0
    """The largest magnitude that becomes zero."""
    share: float = 0.0
    """The norm of what becomes zero over the norm of all."""


def survey(tensor: Any, fmt: Format) -> Survey:
    """Return what rounding ``tensor`` to ``fmt`` loses at the ends of its range."""
    values = np.abs(array_of(tensor))
    if not values.size:
        return Survey(0.0, overflows=False)
    largest = float(values.max())
    if not math.isfinite(largest):
        known = values[np.isfinite(values)]
        return Survey(largest, overflows=bool(known.size) and float(known.max()) >= _TOO_LARGE[fmt.name])
    overflows, lost = largest >= _TOO_LARGE[fmt.name], values[(values > 0) & (values <= fmt.min_subnormal / 2)]
    if not lost.size:
        return Survey(largest, overflows)
    share = float(np.linalg.norm(lost.astype(np.float64)) / np.linalg.norm(values.astype(np.float64)))
    return Survey(largest, overflows, float(lost.max()), share)


_TOO_LARGE = {name: f.max + math.ldexp(1.0, math.frexp(f.max)[1] - f.mantissa_bits - 2) for name, f in FORMATS.items()}
"""The smallest magnitude that rounds to infinity, by format: half a unit in the last place above the largest number."""


def array_of(tensor: Any) -> npt.NDArray[Any]:
    """Return a copy of a tensor's values, 16-bit ones in FP32."""
    narrow = tensor.is_floating_point() and tensor.element_size() < 4
    return np.asarray((tensor.detach().astype(FP32.dtype_name) if narrow else tensor.detach()).numpy())


def is_half(tensor: Any) -> bool:
    """Return whether a tensor has a 16-bit floating-point format."""
    return bool(tensor.is_floating_point() and tensor.element_size() == 2)


def finite(tensor: Any) -> bool:
    """Return whether all values of a tensor are finite; waits for the device."""
    return not tensor.is_floating_point() or bool(np.isfinite(array_of(tensor)).all())


def format_name(tensor: Any) -> str:
    """Return the name of a tensor's format, or its dtype if it is not a floating-point one."""
    dtype = str(tensor.dtype).removeprefix("paddle.")
    return FORMAT_NAMES.get(dtype, dtype)


def operand(tensor: Any) -> Operand:
    """Return a tensor as an operand of the record."""
    values = np.abs(array_of(tensor).astype(np.float64))
    known = values[np.isfinite(values)]
    return Operand(
        format=format_name(tensor),
        shape=list(tensor.shape),
        largest=float(known.max()) if known.size else 0.0,
        smallest=float(known.min()) if known.size else 0.0,
        num_not_finite=int(values.size - known.size),
    )
