"""The values of a Paddle tensor, and which of them a format's range loses."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mezzo.formats import FORMAT_NAMES, FORMATS, FP32, Format
from mezzo.records import Operand


class Survey(NamedTuple):
    """The largest value of a tensor, and which values a format's range loses."""

    largest: float
    """The largest magnitude; not finite if any value is not."""
    overflows: bool
    """Whether a finite value is beyond the format's range."""
    vanished: float = 0.0
    """The largest magnitude that becomes zero."""
    share: float = 0.0
    """The norm of the values that become zero over the norm of all."""


def survey(tensor: Any, fmt: Format) -> Survey:
    """Return which values of ``tensor`` are lost at the ends of the range of ``fmt`` when they are rounded to it."""
    values = np.abs(array_of(tensor))
    if not values.size:
        return Survey(0.0, overflows=False)
    largest = float(values.max())
    if not math.isfinite(largest):
        finite_values = values[np.isfinite(values)]
        overflows = bool(finite_values.size) and float(finite_values.max()) >= _TOO_LARGE[fmt.name]
        return Survey(largest, overflows=overflows)
    overflows, vanished = largest >= _TOO_LARGE[fmt.name], values[(values > 0) & (values <= fmt.min_subnormal / 2)]
    if not vanished.size:
        return Survey(largest, overflows)
    share = float(np.linalg.norm(vanished.astype(np.float64)) / np.linalg.norm(values.astype(np.float64)))
    return Survey(largest, overflows, float(vanished.max()), share)


_TOO_LARGE = {name: f.max + math.ldexp(1.0, math.frexp(f.max)[1] - f.mantissa_bits - 2) for name, f in FORMATS.items()}
"""The smallest magnitude that rounds to infinity, by format: half a unit in the last place above the largest number."""


def array_of(tensor: Any) -> npt.NDArray[Any]:
    """Return a copy of a tensor's values; those of 16 bits in FP32."""
    narrow = tensor.is_floating_point() and tensor.element_size() < 4
    return np.asarray((tensor.detach().astype(FP32.dtype_name) if narrow else tensor.detach()).numpy())


def is_fp32(tensor: Any) -> bool:
    """Return whether a tensor is in FP32.

    Not by ``paddle.float32``: with FLAGS_enable_pir_api=0 that is a name for static programs, which equals no tensor's dtype.
    """
    return bool(tensor.is_floating_point() and tensor.element_size() == FP32.bytes)


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
    """Return the description of a tensor as an operand, for the record."""
    values = np.abs(array_of(tensor).astype(np.float64))
    finite_values = values[np.isfinite(values)]
    return Operand(
        format=format_name(tensor),
        shape=list(tensor.shape),
        largest=float(finite_values.max()) if finite_values.size else 0.0,
        smallest=float(finite_values.min()) if finite_values.size else 0.0,
        num_not_finite=int(values.size - finite_values.size),
    )
