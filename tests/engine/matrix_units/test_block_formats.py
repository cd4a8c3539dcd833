"""Blocks that share scales, to the bit: against torchao's quantisers, and the arithmetic of its GPU kernels written in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from helpers_engine import randn
from mezzo.engine.kernels import cpu
from mezzo.engine.matrix_units.block_formats import (
    SIGNS,
    Blocks,
    hadamard,
    in_blocks,
    round_elements,
    rounded,
    seed_of,
    tensor_scale,
    transformed,
)
from mezzo.formats import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    MX_BLOCK,
    Format,
    ScaleRule,
    blockwise_recipe,
    mx_recipe,
    nvfp4_recipe,
)
from mezzo.formats import in_blocks as format_in_blocks

ao = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="needs pip install 'torchao>=0.18'")
from torchao.prototype.blockwise_fp8_training import kernels as ao_fp8  # noqa: E402
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize  # noqa: E402

BF16, FP32 = torch.bfloat16, torch.float32
SIZE = 1024
"""Rows and columns: a million values."""


def mx(elements: Format, rule: ScaleRule) -> Format:
    return format_in_blocks(elements, MX_BLOCK, rule, scales=E8M0)


NVFP4 = nvfp4_recipe(rule="exact", square=True, hadamard=True, stochastic=True)
FOUR_OR_SIX = nvfp4_recipe(rule="four_or_six", square=True, hadamard=True, stochastic=True)
FP8 = blockwise_recipe("ocp", rule="exact")


@pytest.fixture(scope="module")
def values() -> Tensor:
    """Return a million values over 80 powers of two, with zeros, subnormals, powers of two, and blocks of the smallest scales."""
    x = randn(SIZE, SIZE) * torch.exp2(
        torch.arange(SIZE * 64).mul(37).remainder(80).view(SIZE, 64) - 40.0
    ).repeat_interleave(16, 1)
    x[::7, ::13] = 0.0
    x[5], x[9, :32], x[11], x[12] = 0.0, 1e-40, 1e-39, 3e-38
    x[20:60] = torch.exp2(torch.arange(40 * SIZE).mul(13).remainder(40).view(40, SIZE) - 20.0)
    return x


def with_exceptions(x: Tensor) -> Tensor:
    x = x.clone()
    x[13, 3], x[14, 40], x[15, 100] = math.inf, math.nan, -math.inf
    return x


def four_bit_codes(elements: Tensor) -> Tensor:
    """Return E2M1's codes in pairs, as torchao packs them."""
    magnitudes = torch.bucketize(elements.abs(), torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]))
    codes = (magnitudes + 8 * elements.signbit()).to(torch.uint8)
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def eight_bit_codes(elements: Tensor) -> Tensor:
    return elements.to(torch.float8_e4m3fn).view(torch.uint8)


def scale_codes(scales: Tensor) -> Tensor:
    """Return E8M0's codes."""
    power = torch.frexp(scales.double())[1] - 1
    return torch.where(scales.isnan(), 255, power + 127).to(torch.uint8)


# --- against torchao --------------------------------------------------------------------------------------------------

MX = [
    ("mxfp8", E4M3, torch.float8_e4m3fn, eight_bit_codes),
    ("mxfp4", E2M1, torch.float4_e2m1fn_x2, four_bit_codes),
]


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("rule", ["rceil", "floor"])
@pytest.mark.parametrize(("name", "elements", "stored", "codes"), MX, ids=[row[0] for row in MX])
def test_bytes_and_scales_are_torchaos(
    values: Tensor,
    name: str,
    elements: Format,
    stored: torch.dtype,
    codes: Callable[[Tensor], Tensor],
    rule: ScaleRule,
    dtype: torch.dtype,
) -> None:
    x = with_exceptions(values).to(dtype)
    scales, bytes_ = ao.to_mx(x, stored, MX_BLOCK, ao.ScaleCalculationMode(rule))
    found = in_blocks(x, mx(elements, rule), along=1)

    assert torch.equal(scale_codes(found.scales[:, ::MX_BLOCK]), scales.view(torch.uint8))
    defined = ~found.scales[:, :: 1 if name == "mxfp8" else 2].isnan()  # a NaN block's elements say nothing
    assert torch.equal(codes(found.elements)[defined], bytes_.view(torch.uint8)[defined])
    assert int((~defined).sum()) == MX_BLOCK // (1 if name == "mxfp8" else 2)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_nvfp4_is_torchaos_where_the_tensors_scale_is_a_power_of_two(values: Tensor, dtype: torch.dtype) -> None:
    """Where it is not, torchao's two quantisers differ from each other in the last place of a scale before it is rounded."""
    top = E4M3.max * E2M1.max * 2.0**33
    x = values.clamp(-top, top).to(dtype)
    x[13, 0] = top
    scales, bytes_ = nvfp4_quantize(x, 16, torch.tensor(2.0**33))
    found = in_blocks(x, NVFP4.values, along=1)
    assert torch.equal(eight_bit_codes(found.scales[:, ::16] / 2.0**33), scales.view(torch.uint8))
    assert torch.equal(four_bit_codes(found.elements), bytes_)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_blockwise_fp8_is_torchaos(values: Tensor, dtype: torch.dtype) -> None:
    x = values.to(dtype)
    for quantise, fmt, along, every in (
        (ao_fp8.torch_blockwise_scale_act_quant_lhs, FP8.values, 1, (slice(None), slice(None, None, 128))),
        (ao_fp8.torch_blockwise_scale_act_quant_rhs, FP8.gradients, 0, (slice(None, None, 128), slice(None))),
        (ao_fp8.torch_blockwise_scale_weight_quant, FP8.weights, 0, (slice(None, None, 128), slice(None, None, 128))),
    ):
        bytes_, scales = quantise(x)
        found = in_blocks(x, fmt, along=along)
        assert torch.equal(eight_bit_codes(found.elements), bytes_.view(torch.uint8))
        assert torch.equal(found.scales[every], scales)


# --- against the published arithmetic, in NumPy -----------------------------------------------------------------------

Floats = NDArray[np.float32]
FOUR_BIT_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
FOUR_BIT_ENDS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], dtype=np.float32)
"""Between two values; of the ends, those after an even code belong to it."""


def to_four_bits(x: Floats) -> Floats:
    magnitudes = np.abs(x)
    codes = np.searchsorted(FOUR_BIT_ENDS, magnitudes, side="left")
    tie = np.isin(magnitudes, FOUR_BIT_ENDS) & (codes % 2 == 1)
    return np.copysign(FOUR_BIT_VALUES[codes + tie], x)


def to_e4m3(x: Floats) -> Floats:
    return torch.from_numpy(x).to(torch.float8_e4m3fn).float().numpy()


def nvfp4_blocks(x: Floats, amax: Floats, *, stretch: float = 1.0) -> tuple[Floats, Floats]:
    """Return elements and scales as torchao's training kernels have them (``_nvfp4_quantize``), all in FP32."""
    one, six = np.float32(1), np.float32(6)
    encode = np.float32(448) * six / np.abs(x).max()
    decode = one / encode
    scale = to_e4m3(np.clip(amax / six * encode * np.float32(stretch), np.float32(2.0**-6), np.float32(448)))
    factor = one / (scale * decode)
    return to_four_bits(np.clip(x * factor, -six, six)), scale * decode


def largest(x: Floats, *, square: bool) -> Floats:
    rows, columns = x.shape
    blocks = np.abs(x).reshape(rows // 16, 16, columns // 16, 16)
    amax = blocks.max(axis=(1, 3), keepdims=True) if square else blocks.max(axis=3, keepdims=True)
    return np.broadcast_to(amax, blocks.shape).reshape(x.shape)


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_nvfp4_is_the_training_kernels(square: bool, seed: int) -> None:
    x = (randn(SIZE // 2, SIZE // 2, seed=seed) * torch.exp2(randn(SIZE // 2, 1, seed=9))).bfloat16()
    elements, scales = nvfp4_blocks(x.float().numpy(), largest(x.float().numpy(), square=square))
    found = in_blocks(x, NVFP4.weights if square else NVFP4.values, along=1)
    assert np.array_equal(found.scales.numpy(), scales)
    assert np.array_equal(found.elements.numpy(), elements)


@pytest.mark.parametrize("square", [False, True])
def test_four_or_six_keeps_the_smaller_error(square: bool) -> None:
    x = randn(256, 256).bfloat16()
    plain = x.float().numpy()
    both = [nvfp4_blocks(plain, largest(plain, square=square), stretch=stretch) for stretch in (1.5, 1.0)]
    shape = (16, 16, 16, 16) if square else (256, 1, 16, 16)
    errors = [
        np.abs((elements * scales).astype(np.float64) - plain).reshape(shape).sum(axis=(1, 3), keepdims=True)
        for elements, scales in both
    ]
    four = np.broadcast_to(errors[0] < errors[1], shape).reshape(x.shape)
    expected = np.where(four, both[0][0] * both[0][1], both[1][0] * both[1][1])
    found = rounded(x, FOUR_OR_SIX.weights if square else FOUR_OR_SIX.values, along=1)
    assert np.array_equal(found.numpy(), expected)
    assert (0 if square else 0.2) < four.mean() < 0.8


# --- by hand ----------------------------------------------------------------------------------------------------------

BY_HAND = [
    # format, rule, one block, elements, scale
    (E4M3, "rceil", [448.0, 1.0, -0.3], [448.0, 1.0, -0.3125], 1.0),
    (E4M3, "rceil", [449.0, 1.0, -2.0], [224.0, 0.5, -1.0], 2.0),
    (E4M3, "floor", [500.0, 1.0, -2.0], [448.0, 1.0, -2.0], 1.0),  # saturates
    (E4M3, "floor", [512.0, 1.0, -2.0], [256.0, 0.5, -1.0], 2.0),
    (E2M1, "rceil", [6.0, 5.0, -0.25], [6.0, 4.0, -0.0], 1.0),  # ties to even
    (E2M1, "rceil", [7.0, 2.5, -1.5], [4.0, 1.0, -1.0], 2.0),
    (E2M1, "floor", [7.9, 2.5, -3.5], [6.0, 2.0, -4.0], 1.0),  # saturates, ties to even
    (E2M3, "floor", [7.9, 0.0625, 0.19], [7.5, 0.0, 0.25], 1.0),
    (E3M2, "rceil", [28.0, 0.09375, 17.0], [28.0, 0.125, 16.0], 1.0),
    (E5M2, "rceil", [57344.0, 1.1, 1.2], [57344.0, 1.0, 1.25], 1.0),
    (E4M3, "rceil", [0.0, 0.0, -0.0], [0.0, 0.0, -0.0], 2.0**-127),
    (E4M3, "rceil", [math.inf, 1.0, 2.0], [448.0, 0.0, 0.0], 2.0**127),
]


@pytest.mark.parametrize(("elements", "rule", "block", "expected", "scale"), BY_HAND)
def test_one_block(elements: Format, rule: ScaleRule, block: list[float], expected: list[float], scale: float) -> None:
    found = in_blocks(torch.tensor([block]), mx(elements, rule), along=1)
    assert found.elements.tolist() == [expected]
    assert [math.copysign(1, x) for x in found.elements[0].tolist()] == [math.copysign(1, x) for x in expected]
    assert found.scales.unique().tolist() == [scale]


@pytest.mark.parametrize("fmt", [E2M1, E2M3, E3M2, E4M3, E5M2], ids=lambda f: f.name)
def test_elements_are_the_nearest_values_of_the_format(fmt: Format) -> None:
    codes = range(1 << (fmt.exponent_bits + fmt.mantissa_bits))
    fields = [divmod(code, 1 << fmt.mantissa_bits) for code in codes]
    every = torch.tensor([2.0 ** (max(e, 1) - fmt.bias) * ((e > 0) + m * fmt.eps) for e, m in fields])
    every = every[every <= fmt.max]
    between = (every[1:] + every[:-1]) / 2
    x = torch.cat([every, between, between * (1 + 2**-20), between * (1 - 2**-20), every[-1:] * 3])
    found = round_elements(x, fmt)
    assert bool(torch.isin(found, every).all())
    assert torch.equal((found - x.clamp(max=fmt.max)).abs(), (x.clamp(max=fmt.max)[:, None] - every).abs().amin(1))
    assert torch.equal(round_elements(-x, fmt), -found)
    places = torch.bucketize(round_elements(between, fmt), every)
    assert bool((places % 2 == 0).all())  # ties are even: the last bit of a code is its place's


OF_ML_DTYPES = {
    E2M1.name: "float4_e2m1fn",
    E2M3.name: "float6_e2m3fn",
    E3M2.name: "float6_e3m2fn",
    E4M3.name: "float8_e4m3fn",
    E5M2.name: "float8_e5m2",
}


@pytest.mark.parametrize("fmt", [E2M1, E2M3, E3M2, E4M3, E5M2], ids=lambda f: f.name)
def test_a_million_elements_are_ml_dtypes(values: Tensor, fmt: Format) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="needs pip install ml_dtypes")
    x = values.clamp(-fmt.max, fmt.max)
    theirs = x.numpy().astype(getattr(ml_dtypes, OF_ML_DTYPES[fmt.name])).astype(np.float32)
    assert torch.equal(round_elements(x, fmt).view(torch.int32), torch.from_numpy(theirs).view(torch.int32))


def test_last_blocks_may_be_short() -> None:
    x = randn(50, 41).bfloat16()
    for along, whole in ((1, slice(0, 32)), (0, slice(0, 32))):
        found = rounded(x, mx(E4M3, "rceil"), along=along)
        part, rest = (x[:, whole], x[:, 32:]) if along else (x[whole], x[32:])
        parts = [rounded(t.contiguous(), mx(E4M3, "rceil"), along=along) for t in (part, rest)]
        assert torch.equal(found, torch.cat(parts, dim=along))


# --- the compiled pass against the reference --------------------------------------------------------------------------

EVERY = {
    "mxfp8 rceil": mx_recipe("mxfp8", rule="rceil", hadamard=False, stochastic=False),
    "mxfp8 floor": mx_recipe("mxfp8", rule="floor", hadamard=False, stochastic=False),
    "mxfp4 rceil": mx_recipe("mxfp4", rule="rceil", hadamard=False, stochastic=False),
    "mxfp4 floor": mx_recipe("mxfp4", rule="floor", hadamard=False, stochastic=False),
    "nvfp4": NVFP4,
    "four or six": FOUR_OR_SIX,
    "fp8 exact": FP8,
    "fp8 rceil": blockwise_recipe("ocp", rule="rceil"),
}


@pytest.mark.skipif(cpu.library()[0] is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", EVERY)
def test_one_compiled_pass_is_the_reference(values: Tensor, name: str) -> None:
    recipe, x = EVERY[name], values[:300, :500].contiguous()
    assert x.is_contiguous()
    for dtype in (FP32, BF16, torch.float16):
        narrow = (
            with_exceptions(x).to(dtype) if "nvfp4" not in name else x.to(dtype).nan_to_num(posinf=6e4, neginf=-6e4)
        )
        for fmt in (recipe.values, recipe.weights):
            for along in (0, 1):
                for seed in (None, torch.tensor(123456789)):
                    found = rounded(narrow, fmt, along=along, seed=seed)
                    blocks = in_blocks(narrow, fmt, along=along, seed=seed)
                    assert same(found, blocks), (dtype, fmt.scaling, along, seed)


def same(found: Tensor, blocks: Blocks) -> bool:
    """Return whether two results have the same bits, wherever they are numbers."""
    expected = blocks.elements * blocks.scales
    numbers = ~expected.isnan()
    return torch.equal(found.isnan(), ~numbers) and torch.equal(
        found[numbers].view(torch.int32), expected[numbers].view(torch.int32)
    )


def test_threads_change_nothing(values: Tensor) -> None:
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(rounded(values, NVFP4.values, along=0, seed=torch.tensor(7)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_compiled_code_rounds_alike() -> None:
    x = randn(64, 96).bfloat16()
    compiled = torch.compile(lambda t: rounded(t, NVFP4.values, along=0, seed=seed_of(t)), backend="eager")
    assert torch.equal(compiled(x), rounded(x, NVFP4.values, along=0, seed=seed_of(x)))


# --- stochastic rounding and the Hadamard transform -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_stochastic_rounding_is_unbiased(dtype: torch.dtype) -> None:
    """The mean of 4,000 roundings of 4,096 values: its distance from the value, in standard errors, is a normal number's."""
    x, draws = randn(4, 1024).to(dtype), 4000
    fmt = NVFP4.gradients
    scale = in_blocks(x, fmt, along=1).scales
    total, squares = torch.zeros(x.shape, dtype=torch.double), torch.zeros(x.shape, dtype=torch.double)
    for seed in range(draws):
        error = (rounded(x, fmt, along=1, seed=torch.tensor(seed * 7919)) / scale).double() - (
            x.float() / scale
        ).double()
        total, squares = total + error, squares + error**2
    saturated = (x.float() / scale).abs() > E2M1.max  # the largest of a block, if its scale was rounded down
    spread = (squares / draws - (total / draws) ** 2).clamp(min=0).sqrt() / draws**0.5
    moving = (spread > 0) & ~saturated
    off = (total / draws)[moving] / spread[moving]
    assert int(moving.sum()) > 3500
    assert abs(float(off.mean())) < 3 / int(moving.sum()) ** 0.5
    assert 0.9 < float(off.std()) < 1.1
    whole = float((total / draws)[moving].sum()) / float((spread[moving] ** 2).sum() ** 0.5)
    assert abs(whole) < 3


def test_seeds_follow_from_values() -> None:
    x, w = randn(32, 32).bfloat16(), randn(32, 32, seed=1).bfloat16()
    assert int(seed_of(x, w)) == int(seed_of(x.clone(), w.clone()))
    assert (
        len({int(seed_of(x, w)), int(seed_of(w, x)), int(seed_of(x)), int(seed_of(x * 2, w)), int(seed_of(x, w * 2))})
        == 5
    )
    assert all(0 <= int(seed_of(randn(8, 8, seed=seed))) < 2**32 for seed in range(50))


def test_the_transform_is_its_own_inverse() -> None:
    matrix = hadamard(torch.device("cpu"))
    assert torch.equal(matrix @ matrix.mT, torch.eye(16))
    by_hand = [[SIGNS[i] * (-1) ** bin(i & j).count("1") / 4 for j in range(16)] for i in range(16)]
    assert matrix.tolist() == by_hand
    x = torch.arange(-128.0, 128.0).view(16, 16)
    assert torch.equal(matrix @ (matrix.mT @ x), x)


@pytest.mark.parametrize("rows", [16, 48, 50, 1])
def test_transformed_operands_have_the_same_product(rows: int) -> None:
    a, b = randn(rows, 24), randn(rows, 40, seed=1)
    mixed = [transformed(t) for t in (a, b)]
    assert [t.shape for t in mixed] == [(-(-rows // 16) * 16, n) for n in (24, 40)]
    exact = a.double().mT @ b.double()
    assert float((mixed[0].double().mT @ mixed[1].double() - exact).abs().max()) < 1e-5 * float(exact.abs().max() + 1)
    low = a.bfloat16()
    expected = (
        hadamard(low.device).mT @ torch.nn.functional.pad(low.float(), (0, 0, 0, -rows % 16)).view(-1, 16, 24)
    ).view(-1, 24)
    assert torch.equal(transformed(low), expected.bfloat16())


def test_a_tensor_of_zeros_has_a_scale() -> None:
    zeros = torch.zeros(16, 16)
    scale = tensor_scale(zeros, NVFP4.values)
    assert scale is not None
    assert scale.item() == 1.0
    assert rounded(zeros, NVFP4.values, along=1).count_nonzero() == 0
