"""Sums in 14 significant bits against hand counts, exact fractions and float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from helpers_engine import casting, randn
from mezzo.engine.kernels import cpu
from mezzo.engine.matrix_units.accumulation import OPERATION, product
from mezzo.engine.matrix_units.block_formats import Blocks, in_blocks
from mezzo.engine.matrix_units.block_linear import LayerPlan, linear
from mezzo.engine.matrix_units.emulation import float8_linear, quantise
from mezzo.formats import RECIPES, blockwise_recipe, format_of
from mezzo.measure.flops import FlopCounter

BF16, FP32 = torch.bfloat16, torch.float32
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
ONE = torch.ones(())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["C++", "torch"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(cpu, "library", lambda: (None, "no compiler"))
    else:
        assert cpu.library()[0] is not None, cpu.library()[1]


def multiplied(a: Tensor, b: Tensor, accumulate: str = "fp22") -> Tensor:
    return product(a, b, (ONE, ONE), accumulate=accumulate, of="results")


def exponent(x: float, least: int) -> int:
    """Return the exponent of a number that is not 0; ``least`` is its format's smallest."""
    return max(math.frexp(x)[1] - 1, least)


def exact_steps(a: Tensor, b: Tensor) -> float:
    """Return a sum of products by the four steps, in exact fractions."""
    least = [int(math.log2(fmt.min_normal)) for x in (a, b) if (fmt := format_of(x.dtype)) is not None]
    pairs = list(zip(a.double().tolist(), b.double().tolist(), strict=True))
    total = Fraction(0)
    for begin in range(0, len(pairs), 32):
        here = [(x, y) for x, y in pairs[begin : begin + 32] if x and y]
        exponents = [exponent(x, least[0]) + exponent(y, least[1]) for x, y in here]
        exponents += [exponent(float(total), -126)] if total else []
        if not exponents:
            continue
        unit = Fraction(2) ** (max(exponents) - 13)
        units = sum(math.trunc(Fraction(x) * Fraction(y) / unit) for x, y in here) + math.trunc(total / unit)
        spare = max(0, abs(units).bit_length() - 14)
        total = (abs(units) >> spare << spare) * (1 if units > 0 else -1) * unit
    return float(total)


UNIT = 2.0**-5  # of a sum whose largest product has the exponent 8
HAND_COUNTS: dict[str, tuple[list[float], list[float], float, float]] = {
    # products as a and b, the sum in FP22, and in FP22 with promotion
    "a whole unit is kept": ([256, UNIT], [1, 1], 256 + UNIT, 256 + UNIT),
    "half a unit is lost": ([256, UNIT / 2], [1, 1], 256, 256),
    "truncated, not rounded": ([256, 1.5 * UNIT], [1, 1], 256 + UNIT, 256 + UNIT),
    "toward zero from below": ([-256, 1.5 * UNIT], [1, -1], -256 - UNIT, -256 - UNIT),
    "toward zero, of opposite signs": ([256, 1.5 * UNIT], [1, -1], 256 - UNIT, 256 - UNIT),
    "each product by itself": ([256, *[UNIT / 2] * 31], [1] * 32, 256, 256),
    "an instruction adds 32 products": ([*[UNIT / 2] * 32, 256], [1] * 33, 256 + 16 * UNIT, 256 + 16 * UNIT),
    "a large sum swallows later ones": ([256, *[0] * 31, *[UNIT / 2] * 320], [1] * 352, 256, 256 + 224 * UNIT / 2),
    "what cancels had set the unit": ([256, -256, UNIT / 2], [1, 1, 1], 0, 0),
    "exponents of operands, not of products": ([192, -192, UNIT / 2], [1.5, 1.5, 1], UNIT / 2, UNIT / 2),
    "14 significant bits of the sum": ([*[1] * 31, 2.0**-7], [*[1] * 31, 2.0**-6], 31, 31),
    "nothing": ([0, 0], [1, 0], 0, 0),
}


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("name", HAND_COUNTS)
def test_hand_counts(name: str) -> None:
    a, b, fp22, promoted = HAND_COUNTS[name]
    rows, columns = torch.tensor([a]).to(E4), torch.tensor(b)[:, None].to(E4)
    assert rows.float().tolist() == [a]  # all are numbers of E4M3
    assert multiplied(rows, columns).tolist() == [[fp22]]
    assert multiplied(rows, columns, "fp22-128").tolist() == [[promoted]]


@pytest.mark.usefixtures("implementation")
def test_a_subnormal_has_its_formats_smallest_exponent() -> None:
    """2^-16 is a subnormal of E5M2, whose smallest exponent is -14: the unit is 2^(-14 + 8 - 13), and 2^-20 is half of it."""
    a = torch.tensor([[2.0**-16, 2.0**-16, 2.0**-14]]).to(E5)
    half, whole = (torch.tensor([[256.0], [-256.0], [last]]).to(E4) for last in (2.0**-6, 2.0**-5))
    assert multiplied(a, half).item() == 0.0
    assert multiplied(a, whole).item() == 2.0**-19


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("formats", [(E4, E4), (E5, E4), (E4, E5)], ids=str)
@pytest.mark.parametrize("width", [1, 31, 33, 300])
def test_random_operands_against_exact_fractions(width: int, formats: tuple[torch.dtype, torch.dtype]) -> None:
    """Magnitudes of all orders, subnormals and zeros among them; more columns than a tile of either implementation."""
    spread = torch.logspace(-9, 8, width, base=2.0)
    a = (randn(3, width) * spread[torch.randperm(width, generator=torch.Generator().manual_seed(1))]).to(formats[0])
    b = (randn(width, 70) * (randn(width, 70, seed=1) > -1)).to(formats[1])
    found = multiplied(a, b)
    assert found.tolist() == [[exact_steps(a[i], b[:, j]) for j in range(70)] for i in range(3)]
    parts = [multiplied(a[:, k : k + 128], b[k : k + 128]) for k in range(0, width, 128)]
    assert torch.equal(multiplied(a, b, "fp22-128"), sum(parts[1:], parts[0]))


@pytest.mark.usefixtures("implementation")
def test_sums_of_positive_products_are_never_above_float64() -> None:
    a, b = randn(4, 2048).abs().to(E4), randn(2048, 8).abs().to(E4)
    exact, fp22, promoted = a.double() @ b.double(), multiplied(a, b).double(), multiplied(a, b, "fp22-128").double()
    assert (fp22 < 0.98 * exact).all()
    assert (promoted < exact).all()
    assert (promoted > 0.999 * exact).all()


@pytest.mark.usefixtures("implementation")
def test_nan_stays_in_its_row_and_empty_operands_have_shapes() -> None:
    a, b = torch.ones(3, 40).to(E4), torch.ones(40, 2).to(E4)
    with_nan = torch.where(torch.eye(3, 40) > 0, torch.nan, 1.0)
    with_nan[1:] = 1.0
    found = multiplied(with_nan.to(E4), b)
    assert found[0].isnan().all()
    assert torch.equal(found[1:], multiplied(a, b)[1:])
    assert torch.equal(multiplied(a[:, :0], b[:0]), torch.zeros(3, 2))
    assert multiplied(a[:0], b).shape == (0, 2)
    assert multiplied(a, b[:, :0], "fp22-128").shape == (3, 0)


def test_threads_share_the_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = randn(5, 64).to(E4), randn(64, 400).to(E4)
    alone = multiplied(a, b)
    torch.set_num_threads(3)
    assert torch.equal(multiplied(a, b), alone)


# --- layers ----------------------------------------------------------------------------------------------------------------------

RECIPE_NAMES = sorted({name for name, _ in RECIPES})


def layer(accumulate: str, recipe: str = "tensorwise") -> list[Tensor]:
    """Return a layer's result and its gradients."""
    x, weight = (randn(96, 512).abs()).bfloat16().requires_grad_(), randn(48, 512, seed=1).abs().requires_grad_()
    y = float8_linear(x, weight, recipe=RECIPES[recipe, "ocp"], accumulate=accumulate)
    y.backward(randn(96, 48, seed=2).abs().bfloat16())
    assert x.grad is not None
    assert weight.grad is not None
    return [y.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_fp32_is_one_product_of_rounded_operands(recipe: str) -> None:
    chosen = RECIPES[recipe, "ocp"]
    x, weight = randn(2, 96, 512).bfloat16(), randn(48, 512, seed=1)
    rounded = [
        stored.float() / factor for stored, factor in (quantise(t, chosen.values, along=-1) for t in (x, weight))
    ]
    assert torch.equal(float8_linear(x, weight, recipe=chosen), F.linear(rounded[0], rounded[1]).to(BF16))


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_a_layers_three_products_are_added_up_as_the_word_says(recipe: str) -> None:
    """``hopper`` is fp22 for the result and fp22-128 for both gradients; all words differ in all products but the shortest."""
    wide, fp22, promoted, hopper = (layer(word, recipe) for word in ("fp32", "fp22", "fp22-128", "hopper"))
    assert torch.equal(hopper[0], fp22[0])
    assert torch.equal(hopper[1], promoted[1])
    assert torch.equal(hopper[2], promoted[2])
    assert not torch.equal(fp22[0], promoted[0])  # sums of 512 products
    assert torch.equal(fp22[1], promoted[1])  # of 48
    for narrow in (fp22, promoted):
        for exact, rounded in zip(wide, narrow, strict=True):
            assert rounded.dtype is exact.dtype
            assert 0 < float((rounded - exact).double().norm() / exact.double().norm()) < 0.02


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_a_result_is_the_sum_divided_by_both_factors(recipe: str) -> None:
    chosen = RECIPES[recipe, "ocp"]
    x, weight = randn(5, 200).bfloat16(), randn(7, 200, seed=1)
    (a, by_a), (b, by_b) = quantise(x, chosen.values, along=-1), quantise(weight.mT, chosen.values, along=0)
    sums = torch.tensor([[exact_steps(a[i], b[:, j]) for j in range(7)] for i in range(5)])
    found = float8_linear(x, weight, recipe=chosen, accumulate="fp22")
    assert torch.equal(found, (sums * by_a.reciprocal() * by_b.reciprocal()).to(BF16))


@pytest.mark.usefixtures("implementation")
def test_sums_of_blocks_are_scaled_where_they_are_promoted() -> None:
    """DeepSeek-V3's recipe: a result and both gradients from exact sums of 128 products, each times its blocks' scales, in FP32."""
    plan = LayerPlan(recipe=blockwise_recipe("ocp", rule="exact"), accumulate="fp22-128")
    x, weight = randn(5, 300).bfloat16().requires_grad_(), randn(200, 300, seed=1).requires_grad_()
    grad = randn(5, 200, seed=2).bfloat16()
    y = linear(x, weight, None, plan)
    found = [y, *torch.autograd.grad(y, [x, weight], grad)]
    low, values, weights = weight.detach().bfloat16(), plan.recipe.values, plan.recipe.weights
    of_x, of_w = in_blocks(x.detach(), values, along=1), in_blocks(low, weights, along=1)
    of_g, of_v = in_blocks(grad, values, along=1), in_blocks(low, weights, along=0)
    by_tokens = [in_blocks(t, values, along=0) for t in (grad, x.detach())]
    pairs = [
        (of_x, of_w),
        (of_g, Blocks(*(t.mT for t in of_v))),
        tuple(Blocks(*(t.mT for t in one)) for one in by_tokens),
    ]
    for result, (a, b) in zip(found, pairs, strict=True):
        rows, columns = range(0, len(a.elements), 3), range(0, len(b.elements), 67)
        for i, j in itertools.product(rows, columns):
            total = torch.zeros(())
            for at in range(0, a.elements.shape[1], 128):
                block = slice(at, at + 128)
                sums = exact_steps(a.elements[i, block].to(E4), b.elements[j, block].to(E4))
                total = total + torch.tensor(sums) * a.scales[i, at] * b.scales[j, at]
            assert result[i, j].bfloat16() == total.bfloat16()


def test_compiled_code_adds_up_alike_and_belongs_to_its_policy() -> None:
    x, weight = randn(6, 512).abs(), randn(5, 512).abs()

    def run(policy: str, *, compiles: bool) -> list[Tensor]:
        leaf = weight.clone().requires_grad_()
        call = torch.compile(F.linear, backend="aot_eager") if compiles else F.linear
        with casting(policy).region():
            y = call(x, leaf)
        y.float().sum().backward()
        assert leaf.grad is not None
        return [y.detach(), leaf.grad]

    results = {}
    for policy in ("fp8", "fp8:accumulate=fp22", "fp8:accumulate=hopper"):
        results[policy] = run(policy, compiles=False)
        assert all(map(torch.equal, results[policy], run(policy, compiles=True)))
    assert not torch.equal(results["fp8"][0], results["fp8:accumulate=fp22"][0])


def test_counters_see_one_product_of_8_bit_numbers() -> None:
    counts = []
    for policy in ("fp8", "fp8:accumulate=fp22"):
        x, weight = randn(6, 64), randn(5, 64).requires_grad_()
        with FlopCounter(in_region=lambda: True) as counter:
            with casting(policy).region():
                y = F.linear(x, weight)
            y.float().sum().backward()
        counts.append(dict(counter.by_format))
    assert counts == [{"e4m3": 2 * 2 * 6 * 5 * 64}] * 2


def test_wide_operands_have_the_exact_product_and_fake_ones_a_shape() -> None:
    """Observers compute an operation again in FP32 or FP64, and predictions with fake tensors."""
    a, b, two = randn(3, 40).to(E4), randn(40, 4).to(E4), torch.tensor(2.0)
    wide = OPERATION(a.double(), b.double(), two.double(), two.double(), False)
    assert torch.equal(wide, a.double() @ b.double() * 4)
    scales = torch.tensor([[2.0, 4.0]] * 3), torch.tensor([[1.0] * 4, [0.5] * 4])
    longer = [randn(3, 200).to(E4).double(), randn(200, 4).to(E4).double()]
    blocks = [longer[0][:, :128] @ longer[1][:128] * 2, longer[0][:, 128:] @ longer[1][128:] * 2]
    assert torch.allclose(OPERATION(*longer, *(s.double() for s in scales), True), sum(blocks), rtol=1e-12, atol=1e-12)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = OPERATION(a, b, two, two, True)
    assert (fake.shape, fake.dtype) == ((3, 4), FP32)
