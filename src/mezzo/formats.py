"""What a number format can represent.

A binary floating-point format is a sign, ``exponent_bits`` and ``mantissa_bits``; its range and spacing follow. With
bias ``b = 2**(exponent_bits - 1) - 1`` the smallest normal is ``2**(1 - b)``, the smallest subnormal ``2**(1 - b -
mantissa_bits)`` and the largest value ``(2 - 2**-mantissa_bits) * 2**b`` where the top exponent is reserved for infinity
and NaN (IEEE 754-2019, section 3.3). E4M3 keeps only one bit pattern for NaN and none for infinity, so its top
exponent encodes numbers: the largest is 448 (Micikevicius et al., arXiv:2209.05433, table 1).

TF32 is a compute format: values are stored as FP32 and the matrix unit reads 10 of their 23 mantissa bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Format:
    """A binary floating-point format, defined by its bits; everything else is derived."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    dtype_name: str
    """The torch dtype that stores it (``float32`` for TF32)."""
    has_inf: bool = True
    fnuz: bool = False
    """Whether the bit pattern of negative zero is the only NaN."""

    @property
    def bias(self) -> int:
        """The exponent bias."""
        return (1 << (self.exponent_bits - 1)) - 1 + self.fnuz

    @property
    def max(self) -> float:
        """The largest finite value."""
        if self.fnuz:
            return (2.0 - 2.0**-self.mantissa_bits) * 2.0 ** ((1 << self.exponent_bits) - 1 - self.bias)
        if self.has_inf:
            return (2.0 - 2.0**-self.mantissa_bits) * 2.0**self.bias
        return (2.0 - 2.0 ** (1 - self.mantissa_bits)) * 2.0 ** (self.bias + 1)

    @property
    def min_normal(self) -> float:
        """The smallest positive value with full precision."""
        return 2.0 ** (1 - self.bias)

    @property
    def min_subnormal(self) -> float:
        """The smallest positive value."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    @property
    def eps(self) -> float:
        """The distance from 1 to the next larger value."""
        return 2.0**-self.mantissa_bits

    @property
    def bytes(self) -> int:
        """The bytes of one stored value."""
        return STORED_BYTES[self.dtype_name]

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype that stores the format (imports torch)."""
        import torch

        found = getattr(torch, self.dtype_name)
        assert isinstance(found, torch.dtype)
        return found


STORED_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
}

ALIASES = {"half": "float16", "float": "float32", "double": "float64"}
"""torch's other names of dtypes."""

FP64 = Format(name="fp64", exponent_bits=11, mantissa_bits=52, dtype_name="float64")
FP32 = Format(name="fp32", exponent_bits=8, mantissa_bits=23, dtype_name="float32")
TF32 = Format(name="tf32", exponent_bits=8, mantissa_bits=10, dtype_name="float32")
FP16 = Format(name="fp16", exponent_bits=5, mantissa_bits=10, dtype_name="float16")
BF16 = Format(name="bf16", exponent_bits=8, mantissa_bits=7, dtype_name="bfloat16")
E4M3 = Format(name="e4m3", exponent_bits=4, mantissa_bits=3, dtype_name="float8_e4m3fn", has_inf=False)
E5M2 = Format(name="e5m2", exponent_bits=5, mantissa_bits=2, dtype_name="float8_e5m2")
E4M3FNUZ = Format(
    name="e4m3fnuz", exponent_bits=4, mantissa_bits=3, dtype_name="float8_e4m3fnuz", has_inf=False, fnuz=True
)
E5M2FNUZ = Format(
    name="e5m2fnuz", exponent_bits=5, mantissa_bits=2, dtype_name="float8_e5m2fnuz", has_inf=False, fnuz=True
)

FORMATS = {f.name: f for f in (FP64, FP32, TF32, FP16, BF16, E4M3, E5M2, E4M3FNUZ, E5M2FNUZ)}
FORMAT_NAMES = {f.dtype_name: f.name for f in FORMATS.values() if f is not TF32}
"""Names of formats by the dtypes that store them."""
FP8_PAIRS = {"ocp": (E4M3, E5M2), "fnuz": (E4M3FNUZ, E5M2FNUZ)}
"""The formats of 8-bit operands and gradients: the Open Compute Project's, as NVIDIA and newer AMD GPUs have them, and MI300's."""


def format_of(dtype: torch.dtype) -> Format | None:
    """Return the format that ``dtype`` stores, or None for an integer, boolean or complex dtype."""
    return FORMATS.get(FORMAT_NAMES.get(str(dtype).removeprefix("torch."), ""))
