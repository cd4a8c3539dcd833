"""What a number format can represent.

A binary floating-point format is a sign, ``exponent_bits`` and ``mantissa_bits``; its range and spacing follow. With
bias ``b = 2**(exponent_bits - 1) - 1`` the smallest normal is ``2**(1 - b)``, the smallest subnormal ``2**(1 - b -
mantissa_bits)``, and the largest value the highest code that stands for a number: the top exponent is reserved for infinity
and NaN (IEEE 754-2019, section 3.3), or in E4M3 one code for NaN alone, so that its largest is 448 (Micikevicius et al.,
arXiv:2209.05433, table 1).

TF32 is a compute format: values are stored as FP32 and the matrix unit reads 10 of their 23 mantissa bits.

Values of few bits share scales, one for a tensor, a row, or a block: ``Scaling``. Blocks of 32 with scales in E8M0 are the Open Compute
Project's MX formats (OCP Microscaling Formats 1.0, tables 1 to 7), blocks of 16 with scales in E4M3 under one FP32 scale are NVIDIA's
NVFP4. A ``Recipe`` names the scaled formats of a product's operands and of gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import torch


ScaleRule: TypeAlias = Literal["exact", "floor", "rceil", "four_or_six"]
"""How a scale follows from the largest magnitude that it covers, ``amax``, in a format whose largest value is ``max``.

``exact``        ``amax / max``
``rceil``        the smallest power of two not below ``amax / max``, so that nothing saturates (NVIDIA's rule, ``cvt.rp``)
``floor``        the power of two of ``amax`` divided by the one of ``max``: the last eighth (E4M3) or quarter (E2M1) of a block saturates
                 (OCP MX 1.0, section 6.3)
``four_or_six``  in E2M1: ``amax / 6`` or ``amax / 4``, whichever leaves the smaller sum of errors (Cook et al., arXiv:2512.02010)
"""


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The scales that the values of a format share: a value is a stored number times its scale."""

    extent: Literal["tensor", "row"] | int | tuple[int, int]
    """What one scale covers: a tensor, a row that a product sums over, so many values of such a row, or a tile of rows and columns."""
    format: Format
    """The format of the scales."""
    rule: ScaleRule = "exact"
    over: Scaling | None = None
    """The scales that these scales share, which are applied first."""

    def tile(self, along: int) -> tuple[int, int]:
        """Return the rows and columns of a block of a matrix, in a product that sums along dimension ``along``."""
        assert not isinstance(self.extent, str)
        if isinstance(self.extent, tuple):
            return self.extent
        return (self.extent, 1) if along == 0 else (1, self.extent)

    @property
    def values(self) -> int:
        """The values of a block."""
        rows, columns = self.tile(0)
        return rows * columns


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
    def max_exponent(self) -> int:
        """The exponent of the largest finite value."""
        return math.frexp(self.max)[1] - 1

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
        if self.scaling is None or isinstance(self.scaling.extent, str):
            return bits
        return bits + self.scaling.format.bits_per_value / self.scaling.values

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


# The elements and scales of blocks. torch stores none of them one by one: E2M1 in pairs only, E8M0 without arithmetic.
E2M1 = Format(name="e2m1", exponent_bits=2, mantissa_bits=1, has_inf=False, has_nan=False)
E2M3 = Format(name="e2m3", exponent_bits=2, mantissa_bits=3, has_inf=False, has_nan=False)
E3M2 = Format(name="e3m2", exponent_bits=3, mantissa_bits=2, has_inf=False, has_nan=False)
E8M0 = Format(name="e8m0", exponent_bits=8, mantissa_bits=0, signed=False, has_inf=False)
MX_BLOCK, NVFP4_BLOCK, FP8_BLOCK = 32, 16, 128
"""Values that share a scale: OCP MX 1.0, NVIDIA's NVFP4, and DeepSeek-V3's FP8 (arXiv:2412.19437, section 3.3)."""


def in_blocks(elements: Format, extent: int | tuple[int, int], rule: ScaleRule, *, scales: Format) -> Format:
    """Return the format of ``elements`` with a scale for each block."""
    over = Scaling(extent="tensor", format=FP32) if elements is E2M1 and scales is E4M3 else None
    return replace(elements, scaling=Scaling(extent=extent, format=scales, rule=rule, over=over))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How linear layers compute in 8 or 4 bits."""

    name: str
    values: Format
    """The format of inputs."""
    weights: Format
    gradients: Format
    reason: str
    """What its scales are good for."""
    product: str = ""
    """The name under which its products are counted; empty for the name of ``values``."""
    multiple: int = 16
    """Inputs and outputs of a layer have to be multiples of it."""
    too_small: tuple[tuple[float, float], ...] = ()
    """A layer does not gain if one of these has no fewer outputs and inputs (torchao's measurements on H100s)."""
    hadamard: bool = False
    """Whether the operands of a weight's gradient are transformed first, which spreads a large value over its block."""
    stochastic: bool = False
    """Whether gradients are rounded up or down at random, in proportion to the distances, instead of to the nearest."""

    @property
    def by_layer(self) -> bool:
        """Whether it is applied to chosen layers, also where it is emulated; else emulation applies it to every linear operation."""
        return not isinstance(self.values.scaling and self.values.scaling.extent, str)


def _recipes(pair: str) -> tuple[Recipe, ...]:
    e4m3, e5m2 = FP8_PAIRS[pair]
    by_tensor = Scaling(extent="tensor", format=FP32)
    tensorwise = replace(e4m3, scaling=by_tensor)
    by_row = replace(e4m3, scaling=Scaling(extent="row", format=FP32, rule="rceil"))
    return (
        Recipe(
            name="tensorwise",
            values=tensorwise,
            weights=tensorwise,
            gradients=replace(e5m2, scaling=by_tensor),
            reason="one scale per tensor, from its largest magnitude at each use",
            too_small=((1024, 4096),),
        ),
        Recipe(
            name="rowwise",
            values=by_row,
            weights=by_row,
            gradients=by_row,
            reason="one scale per row, so that E4M3's range is enough for gradients and a large value costs its own row only",
            too_small=((2048, math.inf), (math.inf, 1024), (4096, 2048)),
        ),
    )


RECIPES = {(recipe.name, pair): recipe for pair in FP8_PAIRS for recipe in _recipes(pair)}
"""By name and pair of formats; the first name is the default."""
BLOCKWISE = "blockwise"
RECIPE_NAMES = (*dict.fromkeys(name for name, _ in RECIPES), BLOCKWISE)
"""The recipes of the policy ``fp8``."""


def blockwise_recipe(pair: str, *, rule: ScaleRule) -> Recipe:
    """Return FP8 with a scale for every 128 values of a row, and for every 128 x 128 of a weight (DeepSeek-V3)."""
    e4m3, _ = FP8_PAIRS[pair]
    scales = FP32 if rule == "exact" else E8M0
    by_row = in_blocks(e4m3, FP8_BLOCK, rule, scales=scales)
    return Recipe(
        name=BLOCKWISE,
        values=by_row,
        weights=in_blocks(e4m3, (FP8_BLOCK, FP8_BLOCK), rule, scales=scales),
        gradients=by_row,
        reason="a large value costs the 127 beside it only",
        multiple=FP8_BLOCK,
    )


def mx_recipe(name: str, *, rule: ScaleRule, hadamard: bool, stochastic: bool) -> Recipe:
    """Return ``mxfp8`` or ``mxfp4``: blocks of 32 whose scales are powers of two (OCP MX 1.0)."""
    blocks = in_blocks(E4M3 if name == "mxfp8" else E2M1, MX_BLOCK, rule, scales=E8M0)
    return Recipe(
        name=name,
        values=blocks,
        weights=blocks,
        gradients=blocks,
        reason="a scale in 8 bits for every 32 values; each product rounds its operands anew, in blocks along its own sum",
        product=name,
        multiple=MX_BLOCK,
        hadamard=hadamard,
        stochastic=stochastic,
    )


def nvfp4_recipe(*, rule: ScaleRule, square: bool, hadamard: bool, stochastic: bool) -> Recipe:
    """Return NVIDIA's NVFP4: blocks of 16 with scales in E4M3 under one FP32 scale (arXiv:2509.25149)."""
    blocks = in_blocks(E2M1, NVFP4_BLOCK, rule, scales=E4M3)
    tiles = in_blocks(E2M1, (NVFP4_BLOCK, NVFP4_BLOCK), rule, scales=E4M3)
    return Recipe(
        name="nvfp4",
        values=blocks,
        weights=tiles if square else blocks,
        gradients=blocks,
        reason="a scale with 3 mantissa bits for every 16 values, so that the largest of each block keeps its place",
        product="nvfp4",
        multiple=NVFP4_BLOCK,
        hadamard=hadamard,
        stochastic=stochastic,
    )


def format_of(dtype: torch.dtype) -> Format | None:
    """Return the format that ``dtype`` stores, or None for an integer, boolean or complex dtype."""
    return FORMATS.get(FORMAT_NAMES.get(str(dtype).removeprefix("torch."), ""))
