"""Number formats against torch's own tables and values computed by hand."""

import math

import pytest
import torch

from mezzo.formats import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0,
    FORMATS,
    FP16,
    FP32,
    FP64,
    MX_BLOCK,
    RECIPES,
    TF32,
    Format,
    blockwise_recipe,
    format_of,
    in_blocks,
    mx_recipe,
    nvfp4_recipe,
)

STORED = [FP64, FP32, FP16, BF16, E4M3, E5M2, E4M3FNUZ, E5M2FNUZ]
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2fnuz": torch.float8_e5m2fnuz,
}


@pytest.mark.parametrize("fmt", STORED, ids=lambda f: f.name)
def test_derived_values_equal_torch_finfo(fmt: Format) -> None:
    info = torch.finfo(DTYPES[fmt.name])

    eps = (
        0.25 if fmt is E5M2FNUZ else info.eps
    )  # torch 2.13 says 0.125, against its own bit patterns, which the next test reads
    assert (fmt.max, fmt.min_normal, fmt.eps) == (info.max, info.tiny, eps)
    assert fmt.min_subnormal == info.tiny * eps
    assert fmt.bytes == info.bits // 8
    assert fmt.dtype is DTYPES[fmt.name]
    assert 1 + fmt.exponent_bits + fmt.mantissa_bits == info.bits


@pytest.mark.parametrize("fmt", [FP16, BF16, E4M3, E5M2, E4M3FNUZ, E5M2FNUZ], ids=lambda f: f.name)
def test_every_bit_pattern_lies_inside_the_derived_range(fmt: Format) -> None:
    width, pattern = (torch.uint8, 256) if fmt.bytes == 1 else (torch.uint16, 65536)
    values = torch.arange(pattern).to(width).view(DTYPES[fmt.name]).double()
    positive = values[values.isfinite() & (values > 0)]

    assert (positive.max().item(), positive.min().item()) == (fmt.max, fmt.min_subnormal)
    assert bool(values.isinf().any()) == fmt.has_inf
    above_one = positive[positive > 1].min().item()
    assert above_one - 1 == fmt.eps
    subnormal = positive < fmt.min_normal
    assert int(subnormal.sum()) == 2**fmt.mantissa_bits - 1


HAND_VALUES = [
    # name, bias, max, min normal, min subnormal, eps, bytes
    ("fp64", 1023, 1.7976931348623157e308, 2.2250738585072014e-308, 5e-324, 2.0**-52, 8),
    ("fp32", 127, 3.4028234663852886e38, 2.0**-126, 2.0**-149, 2.0**-23, 4),
    ("tf32", 127, 2.0**127 * (2 - 2.0**-10), 2.0**-126, 2.0**-136, 2.0**-10, 4),
    ("fp16", 15, 65504.0, 2.0**-14, 2.0**-24, 2.0**-10, 2),
    ("bf16", 127, 3.3895313892515355e38, 2.0**-126, 2.0**-133, 2.0**-7, 2),
    ("e4m3", 7, 448.0, 2.0**-6, 2.0**-9, 0.125, 1),
    ("e5m2", 15, 57344.0, 2.0**-14, 2.0**-16, 0.25, 1),
    ("e4m3fnuz", 8, 240.0, 2.0**-7, 2.0**-10, 0.125, 1),
    ("e5m2fnuz", 16, 57344.0, 2.0**-15, 2.0**-17, 0.25, 1),
]


@pytest.mark.parametrize(
    ("name", "bias", "largest", "min_normal", "min_subnormal", "eps", "size"),
    HAND_VALUES,
    ids=[row[0] for row in HAND_VALUES],
)
def test_hand_values(
    name: str,
    bias: int,
    largest: float,
    min_normal: float,
    min_subnormal: float,
    eps: float,
    size: int,
) -> None:
    fmt = FORMATS[name]

    assert fmt.bias == bias
    assert (fmt.max, fmt.min_normal, fmt.min_subnormal) == (largest, min_normal, min_subnormal)
    assert (fmt.eps, fmt.bytes) == (eps, size)
    assert math.isfinite(fmt.max)


def test_every_format_has_a_row_of_hand_values() -> None:
    assert list(FORMATS) == [row[0] for row in HAND_VALUES]
    assert all(fmt.name == name for name, fmt in FORMATS.items())


@pytest.mark.parametrize("fmt", STORED, ids=lambda f: f.name)
def test_format_of_inverts_dtype(fmt: Format) -> None:
    assert format_of(fmt.dtype) is fmt


def test_tf32_is_stored_as_fp32() -> None:
    assert TF32.dtype is torch.float32
    assert format_of(TF32.dtype) is FP32


@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e8m0fnu],
    ids=str,
)
def test_format_of_anything_else_is_none(dtype: torch.dtype) -> None:
    assert format_of(dtype) is None


NO_FIELDS: dict[str, bool] = {"hadamard": False, "stochastic": False}
BLOCKS = [
    # format, largest, smallest normal and subnormal, bits of a value with its share of the scales, bits for the whole tensor
    (in_blocks(E4M3, MX_BLOCK, "rceil", scales=E8M0), 448.0, 2.0**-6, 2.0**-9, 8.25, 0),
    (in_blocks(E5M2, MX_BLOCK, "rceil", scales=E8M0), 57344.0, 2.0**-14, 2.0**-16, 8.25, 0),
    (in_blocks(E2M3, MX_BLOCK, "floor", scales=E8M0), 7.5, 1.0, 0.125, 6.25, 0),
    (in_blocks(E3M2, MX_BLOCK, "floor", scales=E8M0), 28.0, 0.25, 0.0625, 6.25, 0),
    (mx_recipe("mxfp4", rule="rceil", **NO_FIELDS).values, 6.0, 1.0, 0.5, 4.25, 0),
    (nvfp4_recipe(rule="exact", square=True, **NO_FIELDS).values, 6.0, 1.0, 0.5, 4.5, 32),
    (nvfp4_recipe(rule="exact", square=True, **NO_FIELDS).weights, 6.0, 1.0, 0.5, 4 + 8 / 256, 32),
    (blockwise_recipe("ocp", rule="exact").values, 448.0, 2.0**-6, 2.0**-9, 8.25, 0),
    (blockwise_recipe("ocp", rule="rceil").weights, 448.0, 2.0**-6, 2.0**-9, 8 + 8 / 2**14, 0),
    (E8M0, 2.0**127, 2.0**-127, 2.0**-127, 8, 0),
    (RECIPES["tensorwise", "ocp"].gradients, 57344.0, 2.0**-14, 2.0**-16, 8, 32),
    (RECIPES["rowwise", "fnuz"].gradients, 240.0, 2.0**-7, 2.0**-10, 8, 0),
]


@pytest.mark.parametrize(
    ("fmt", "largest", "normal", "smallest", "bits", "of_tensor"),
    BLOCKS,
    ids=[f"{row[0].name} {number}" for number, row in enumerate(BLOCKS)],
)
def test_formats_with_scales(
    fmt: Format, largest: float, normal: float, smallest: float, bits: float, of_tensor: int
) -> None:
    """The formats of the Open Compute Project (OCP MX 1.0, tables 1 to 7) and NVIDIA's NVFP4, by hand."""
    found = (fmt.max, fmt.min_normal, fmt.min_subnormal, fmt.bits_per_value, fmt.bits_per_tensor)
    assert found == (largest, normal, smallest, bits, of_tensor)


def test_the_values_of_four_bits() -> None:
    """Every value of E2M1, from its bits: OCP MX 1.0, table 5."""
    codes = [(exponent, mantissa) for exponent in range(4) for mantissa in range(2)]
    values = [2.0 ** (max(e, 1) - E2M1.bias) * ((e > 0) + m * E2M1.eps) for e, m in codes]
    assert values == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert max(values) == E2M1.max
    assert E2M1.max_exponent == 2
    assert E4M3.max_exponent == 8
    assert E5M2.max_exponent == 15
