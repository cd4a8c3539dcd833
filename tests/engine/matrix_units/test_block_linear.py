"""Linear layers in blocks: against torchao's emulated MXFP8 layer, and for the other formats against products of operands rounded here."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers_engine import randn, same_bits, saved_bytes, ulps
from mezzo.engine.matrix_units.block_formats import in_blocks, rounded, seed_of, transformed
from mezzo.engine.matrix_units.block_linear import LayerPlan, LayerProduct, linear
from mezzo.engine.matrix_units.emulation_nodes import Linear
from mezzo.formats import Format, Recipe, ScaleRule, blockwise_recipe, mx_recipe, nvfp4_recipe

mxfp8_linear = pytest.importorskip(
    "torchao.prototype.moe_training.mxfp8_linear", reason="needs pip install 'torchao>=0.18'"
)
from torchao.prototype.mx_formats import config as ao  # noqa: E402
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference  # noqa: E402

BF16 = torch.bfloat16
SHAPES = [((64,), 32, 64), ((2, 48), 96, 32), ((3, 2, 32), 64, 96), ((256,), 256, 128)]


def mxfp8(rule: ScaleRule = "rceil", name: str = "mxfp8") -> Recipe:
    return mx_recipe(name, rule=rule, hadamard=False, stochastic=False)


def ours(x: Tensor, weight: Tensor, start: Tensor, plan: LayerPlan) -> list[Tensor]:
    """Return the result and both gradients."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = linear(x, weight, None, plan)
    return [y.detach(), *torch.autograd.grad(y, [x, weight], start)]


def torchaos(
    x: Tensor, weight: Tensor, start: Tensor, *, elements: torch.dtype, rule: str, with_hp: bool
) -> list[Tensor]:
    x, weight = x.clone().requires_grad_(), weight.bfloat16().requires_grad_()
    kernels = KernelPreference.EMULATED, ao.MXFP8Dim0CastKernelChoice.TORCH, ao.MXFP8Dim1CastKernelChoice.TORCH
    y = mxfp8_linear.mx_mm.apply(x, weight, *[elements] * 3, 32, *kernels, ao.ScaleCalculationMode(rule), with_hp)
    return [y.detach(), *torch.autograd.grad(y, [x, weight], start)]


@pytest.mark.parametrize("with_hp", [False, True], ids=["", "wgrad in bf16"])
@pytest.mark.parametrize("rule", ["rceil", "floor"])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_a_layer_and_its_gradients_are_torchaos(name: str, rule: ScaleRule, with_hp: bool) -> None:
    elements = torch.float8_e4m3fn if name == "mxfp8" else torch.float4_e2m1fn_x2
    plan = LayerPlan(recipe=mxfp8(rule, name), in_16_bits=frozenset(("wgrad",)) if with_hp else frozenset())
    same = total = 0
    for rows, inputs, outputs in SHAPES:
        x, weight = (
            (randn(*rows, inputs) * torch.exp2(randn(inputs, seed=4) * 3)).bfloat16(),
            randn(outputs, inputs, seed=1),
        )
        start = (randn(*rows, outputs, seed=2) * 1e-3).bfloat16()
        found, expected = (
            ours(x, weight, start, plan),
            torchaos(x, weight, start, elements=elements, rule=rule, with_hp=with_hp),
        )
        for mine, theirs in zip(found, expected, strict=True):
            apart = ulps(mine.to(BF16), theirs)
            near = (mine.double() - theirs.double()).abs() <= 1e-5 * theirs.double().abs().max()
            assert ((apart <= 1) | near).all()  # one rounding of the accumulation's result
            same, total = same + int((apart == 0).sum()), total + mine.numel()
    assert same >= 0.997 * total


def test_operands_are_in_blocks_along_the_sum() -> None:
    """The three products of MXFP8, from operands that torchao's quantiser made: the same sums, so the same bits."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    def wide(t: Tensor) -> Tensor:
        mode = ao.ScaleCalculationMode.RCEIL
        return MXTensor.to_mx(t.contiguous(), torch.float8_e4m3fn, 32, mode, KernelPreference.EMULATED).dequantize(
            torch.float32
        )

    x, weight, start = randn(64, 96).bfloat16(), randn(128, 96, seed=1).bfloat16(), randn(64, 128, seed=2).bfloat16()
    expected = [
        F.linear(wide(x), wide(weight)),
        wide(start) @ wide(weight.mT).mT,
        wide(start.mT) @ wide(x.mT).mT,
    ]
    assert same_bits(ours(x, weight, start, LayerPlan(recipe=mxfp8())), [t.bfloat16() for t in expected])


def in_float64(x: Tensor, fmt: Format, along: int, seed: Tensor | None = None) -> Tensor:
    blocks = in_blocks(x, fmt, along=along, seed=seed)
    return blocks.elements.double() * blocks.scales.double()


RECIPES = {
    "nvfp4": nvfp4_recipe(rule="exact", square=True, hadamard=True, stochastic=True),
    "four or six": nvfp4_recipe(rule="four_or_six", square=False, hadamard=False, stochastic=False),
    "mxfp4, transformed": mx_recipe("mxfp4", rule="rceil", hadamard=True, stochastic=True),
    "fp8 in blocks": blockwise_recipe("ocp", rule="exact"),
    "fp8 in blocks, fnuz": blockwise_recipe("fnuz", rule="rceil"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_products_against_float64(name: str) -> None:
    recipe = RECIPES[name]
    x, weight, start = randn(256, 128).bfloat16(), randn(256, 128, seed=1), (randn(256, 256, seed=2) * 1e-4).bfloat16()
    low, seed = weight.bfloat16(), seed_of(start, weight.bfloat16()) if recipe.stochastic else None
    columns = [transformed(start), transformed(x)] if recipe.hadamard else [start, x]
    exact = [
        in_float64(x, recipe.values, 1) @ in_float64(low, recipe.weights, 1).mT,
        in_float64(start, recipe.gradients, 1, seed) @ in_float64(low, recipe.weights, 0),
        in_float64(columns[0], recipe.gradients, 0, None if seed is None else seed ^ 1).mT
        @ in_float64(columns[1], recipe.values, 0),
    ]
    for found, wide in zip(ours(x, weight, start, LayerPlan(recipe=recipe)), exact, strict=True):
        assert float((found.double() - wide).abs().max()) <= 2**-8 * float(wide.abs().max())
        assert float((found.double() - wide.to(BF16).double()).abs().max()) <= 2**-7 * float(wide.abs().max())
        assert int((found.to(BF16) != wide.to(BF16)).sum()) <= 0.003 * found.numel()


@pytest.mark.parametrize("name", ["nvfp4", "fp8 in blocks"])
def test_tiles_of_a_weight_have_the_same_values_in_both_products(name: str) -> None:
    weight, fmt = randn(128, 256).bfloat16(), RECIPES[name].weights
    assert same_bits([rounded(weight, fmt, along=0)], [rounded(weight, fmt, along=1)])
    assert not same_bits(
        [rounded(weight, RECIPES[name].values, along=0)], [rounded(weight, RECIPES[name].values, along=1)]
    )


@pytest.mark.parametrize("kept", [("forward",), ("dgrad",), ("wgrad",), ("forward", "dgrad", "wgrad")])
def test_products_that_stay_in_bf16_are_bf16s(kept: Sequence[LayerProduct]) -> None:
    x, weight, start = randn(96, 64).bfloat16(), randn(32, 64, seed=1).bfloat16(), randn(96, 32, seed=2).bfloat16()
    a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = Linear.apply(a, b, None)
    in_bf16 = [y.detach(), *torch.autograd.grad(y, [a, b], start)]
    in_few = ours(x, weight, start, LayerPlan(recipe=mxfp8()))
    plan = LayerPlan(recipe=mxfp8(), in_16_bits=frozenset(kept))
    products: tuple[LayerProduct, ...] = ("forward", "dgrad", "wgrad")
    for number, product in enumerate(products):
        expected = in_bf16[number] if product in kept else in_few[number]
        assert same_bits([ours(x, weight, start, plan)[number]], [expected])
        assert not same_bits([in_bf16[number]], [in_few[number]])
        assert plan.format_of(product) == ("bf16" if product in kept else "mxfp8")


def test_gradients_are_rounded_anew_with_every_weight() -> None:
    """The same gradient of 1,000 layers whose weights differ in a bit: the mean of its roundings is the gradient."""
    recipe = RECIPES["nvfp4"]
    start = torch.full((16, 16), 1.0).bfloat16()
    start[0, 0] = 5.0  # the scale of the first row is 5/6: 1 lies between two elements
    results = [
        rounded(start, recipe.gradients, along=1, seed=seed_of(start, torch.tensor([float(n)]).bfloat16()))
        for n in range(256)
    ]
    assert len({float(t[0, 5]) for t in results}) == 2
    row = torch.stack([t[0, 1:] for t in results]).double()
    assert abs(float(row.mean()) - 1) < 3 * float(row.std()) / row.numel() ** 0.5
    assert same_bits(
        [results[3]], [rounded(start, recipe.gradients, along=1, seed=seed_of(start, torch.tensor([3.0]).bfloat16()))]
    )


def test_what_is_kept_for_the_backward_pass() -> None:
    x, weight = randn(64, 32).bfloat16().requires_grad_(), randn(96, 32).requires_grad_()
    with saved_bytes() as kept:
        linear(x, weight, None, LayerPlan(recipe=RECIPES["nvfp4"]))
    assert kept["bytes"] == 64 * 32 * 2 + 96 * 32 * 4  # the input in BF16; the parameter itself
