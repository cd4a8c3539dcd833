"""What a number format can represent.

A binary floating-point format is a sign, ``exponent_bits`` and ``mantissa_bits``; its range and spacing follow. With
bias ``b = 2**(exponent_bits - 1) - 1`` the smallest normal is ``2**(1 - b)``, the smallest subnormal ``2**(1 - b -
mantissa_bits)``, and the largest value the highest code that stands for a number: the top exponent is reserved for infinity
and NaN (IEEE 754-2019, section 3.3), or in E4M3 one code for NaN alone, so that its largest is 448 (Micikevicius et al.,
arXiv:2209.05433, table 1).

TF32 is a compute format: values are stored as FP32 and the matrix unit reads 10 of their 23 mantissa bits.

Values of few bits share scales, one for a tensor, a row, or a block: ``Scaling``. A ``Recipe`` names the scaled formats of a
product's operands and of gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import torch


ScaleRule: TypeAlias = Literal["exact", "power of two below", "power of two above"]
"""How a scale follows from the largest magnitude that it covers: its quotient by the format's largest value, or a power of two."""


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The scales that the values of a format share: a value is a stored number times its scale."""

    extent: Literal["tensor", "row"] | int
    """What one scale covers: a tensor, a row that a product sums over, or so many values of such a row."""
    format: Format
    """The format of the scales."""
    rule: ScaleRule = "exact"
    over: Scaling | None = None
    """The scales that these scales share, which are applied first."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """A binary floating-point format, defined by its bits; everything else is derived."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    dtype_name: str = ""
    """The torch dtype that stores it (``float32`` for TF32); empty if torch has none."""
    signed: bool = True
    has_inf: bool = True
    """Whether the top exponent is reserved for infinity and NaN."""
    has_nan: bool = True
    fnuz: bool = False
    """Whether the bit pattern of negative zero is the only NaN."""
    scaling: Scaling | None = None

    @property
    def bias(self) -> int:
        """The exponent bias."""
        return (1 << (self.exponent_bits - 1)) - 1 + self.fnuz

    @property
    def max(self) -> float:
        """The largest finite value."""
        top = (1 << (self.exponent_bits + self.mantissa_bits)) - 1
        if self.has_inf:
            top -= 1 << self.mantissa_bits
        elif self.has_nan and not self.fnuz:
            top -= 1
        exponent, mantissa = divmod(top, 1 << self.mantissa_bits)
        return (1.0 + mantissa * self.eps) * 2.0 ** (exponent - self.bias)

    @property
    def min_normal(self) -> float:
        """The smallest positive value with full precision."""
        return 2.0 ** ((self.mantissa_bits > 0) - self.bias)  # without a mantissa there are no subnormals, and no zero

    @property
    def min_subnormal(self) -> float:
        """The smallest positive value."""
        return self.min_normal * self.eps

    @property
    def eps(self) -> float:
        """The distance from 1 to the next larger value."""
        return 2.0**-self.mantissa_bits

    @property
    def bytes(self) -> int:
        """The bytes of one stored value."""
        return STORED_BYTES[self.dtype_name]

    @property
    def bits_per_value(self) -> float:
        """The bits of one value and its share of block scales; scales of a whole row or tensor are not counted."""
        bits = self.signed + self.exponent_bits + self.mantissa_bits
        if self.scaling is None or not isinstance(self.scaling.extent, int):
            return bits
        return bits + self.scaling.format.bits_per_value / self.scaling.extent

    @property
    def bits_per_tensor(self) -> int:
        """The bits of scales that a whole tensor shares."""
        scaling, bits = self.scaling, 0
        while scaling is not None:
            bits += int(scaling.format.bits_per_value) if scaling.extent == "tensor" else 0
            scaling = scaling.over
        return bits

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

DTYPE_ALIASES = {"half": "float16", "float": "float32", "double": "float64"}
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


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How linear layers compute in 8 bits: torchao's recipe of this name."""

    name: str
    values: Format
    """The format of inputs and weights."""
    gradients: Format
    reason: str
    """What its scales are good for."""
    too_small: tuple[tuple[float, float], ...]
    """A layer does not gain if one of these has no fewer outputs and inputs (torchao's measurements on H100s)."""


def _recipes(pair: str) -> tuple[Recipe, ...]:
    e4m3, e5m2 = FP8_PAIRS[pair]
    by_tensor = Scaling(extent="tensor", format=FP32)
    by_row = replace(e4m3, scaling=Scaling(extent="row", format=FP32, rule="power of two above"))
    return (
        Recipe(
            name="tensorwise",
            values=replace(e4m3, scaling=by_tensor),
            gradients=replace(e5m2, scaling=by_tensor),
            reason="one scale per tensor, from its largest magnitude at each use",
            too_small=((1024, 4096),),
        ),
        Recipe(
            name="rowwise",
            values=by_row,
            gradients=by_row,
            reason="one scale per row, so that E4M3's range is enough for gradients and a large value costs its own row only",
            too_small=((2048, math.inf), (math.inf, 1024), (4096, 2048)),
        ),
    )


RECIPES = {(recipe.name, pair): recipe for pair in FP8_PAIRS for recipe in _recipes(pair)}
"""By name and pair of formats; the first name is the default."""
RECIPE_NAMES = tuple(dict.fromkeys(name for name, _ in RECIPES))


def format_of(dtype: torch.dtype) -> Format | None:
    """Return the format that ``dtype`` stores, or None for an integer, boolean or complex dtype."""
    return FORMATS.get(FORMAT_NAMES.get(str(dtype).removeprefix("torch."), ""))
