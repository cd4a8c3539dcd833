"""FP8 against torchao: our emulation against torchao's own, and sessions that drive torchao's layers on a GPU's FP8 units.

What is held to the bit, and what is not:

- scales and 8-bit operands: to the bit, for both recipes, every format, zeros, values that are not finite, and magnitudes at which
  a scale is about to change;
- results and gradients of a layer: rounded once to BF16 from FP32 sums of the same products. Both sides call the same matrix
  product here and agree to the bit on the machines tried; only the order of a sum is the library's own affair, so the tests
  allow one unit in the last place in 3 of 1000 elements.

No GPU is needed: torchao emulates its own layers (``emulate=True``), which one function of ``low_layers`` sets here.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mezzo
from helpers_engine import (
    Batch,
    batches,
    casting,
    gradients,
    parameters,
    randn,
    same_bits,
    saved_bytes,
    through_a_file,
    train,
    ulps,
)
from mezzo import Choice, PrecisionWarning, Session, UnsupportedFormatError
from mezzo.devices import Device
from mezzo.engine.matrix_units import emulation, low_layers, native_units
from mezzo.formats import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, Format, Scaling
from mezzo.formats import FP32 as FP32_FORMAT
from mezzo.formats import RECIPES as TABLE
from mezzo.launch.torch.state import TorchRun
from mezzo.measure.flops import FlopCounter
from mezzo.policy import Policy

ao = pytest.importorskip("torchao.float8", reason="needs pip install 'torchao>=0.18'")
from torchao.float8 import float8_scaling_utils  # noqa: E402

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
RECIPES = ("tensorwise", "rowwise")


def emulated_config(recipe: str) -> Any:
    """Return torchao's settings for a recipe, its products computed in FP32."""
    return dataclasses.replace(ao.Float8LinearConfig.from_recipe_name(recipe), emulate=True)


# --- the formats of AMD's MI300 --------------------------------------------------------------------------------------

FNUZ = (E4M3FNUZ, E5M2FNUZ)


def quantise(x: Tensor, fmt: Format, *, along: int | None = None) -> tuple[Tensor, Tensor]:
    """Round to a format with one scale for the tensor, or for each row along a dimension."""
    rows = Scaling(extent="row", format=FP32_FORMAT, rule="rceil")
    scaling = Scaling(extent="tensor", format=FP32_FORMAT) if along is None else rows
    return emulation.quantise(x, dataclasses.replace(fmt, scaling=scaling), along=-1 if along is None else along)


def float8_linear(x: Tensor, weight: Tensor, *, recipe: str = "tensorwise") -> Tensor:
    return emulation.float8_linear(x, weight, recipe=TABLE[recipe, "ocp"])


@pytest.mark.parametrize("fmt", [E4M3, E5M2, *FNUZ], ids=lambda f: f.name)
@pytest.mark.parametrize("along", [None, 0, 1])
def test_operands_are_rounded_as_torch_casts(fmt: Format, along: int | None) -> None:
    x = randn(17, 31) * torch.exp2(torch.arange(31.0) - 15)
    stored, scale = quantise(x, fmt, along=along)

    assert stored.dtype is fmt.dtype
    scaled = x.double() * scale.double()
    assert float(scaled.abs().max()) <= fmt.max * (1 + 2**-20)
    # torch's own cast of the same FP32 values, and the nearest of all 256 values where no two are as near.
    assert torch.equal(stored.view(torch.uint8), (x * scale).clamp(-fmt.max, fmt.max).to(fmt.dtype).view(torch.uint8))
    every = torch.arange(256).to(torch.uint8).view(fmt.dtype).double()
    every = every[every.isfinite()]
    apart = (scaled.reshape(-1, 1) - every).abs()
    assert torch.equal((stored.double().reshape(-1) - scaled.reshape(-1)).abs(), apart.amin(1))


@pytest.mark.parametrize("fmt", FNUZ, ids=lambda f: f.name)
def test_zero_has_no_sign_and_nothing_is_infinite(fmt: Format) -> None:
    stored, _ = quantise(torch.tensor([-0.0, 0.0, 1.0, -1.0]), fmt)
    assert stored.view(torch.uint8)[:2].tolist() == [0, 0]
    assert stored.float()[2:].tolist() == [fmt.max, -fmt.max]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_in_mi300s_formats(recipe: str) -> None:
    policy = Policy.parse(f"fp8:fp8_recipe={recipe}:fp8_formats=fnuz:arithmetic=emulated")
    x, weight = randn(6, 32).bfloat16(), randn(8, 32, seed=1)
    outer = casting(str(policy))
    with outer.region():
        found = F.linear(x, weight)

    (a, scale_a), (b, scale_b) = (quantise(t, E4M3FNUZ, along=-1 if recipe == "rowwise" else None) for t in (x, weight))
    exact = (a.double() / scale_a.double()) @ (b.double() / scale_b.double()).mT
    assert float((found.double() - exact).abs().max()) <= 2**-8 * float(exact.abs().max())
    if recipe == "tensorwise":  # by rows scales are powers of two, and both formats have the same mantissa
        assert not torch.equal(found, float8_linear(x, weight))
    assert [fmt.name for fmt in policy.required_formats] == {
        "tensorwise": ["e4m3fnuz", "e5m2fnuz"],
        "rowwise": ["e4m3fnuz"] * 2,
    }[recipe]


def test_each_device_has_its_own_pair() -> None:
    mi300, mi350 = (Device(kind="cuda", name="an AMD GPU", architecture=a) for a in ("gfx942", "gfx950"))
    h100 = Device(kind="cuda", name="H100", capability=(9, 0))
    ways = {
        (name, pair): Policy.parse(f"fp8:fp8_formats={pair}").arithmetic_on(device)[0]
        for name, device in (("MI300", mi300), ("MI350", mi350), ("H100", h100))
        for pair in ("ocp", "fnuz")
    }
    native = {key for key, way in ways.items() if way == "native"}
    assert native == {("MI300", "fnuz"), ("MI350", "ocp"), ("H100", "ocp")}


# --- our emulation against torchao's: scales and operands ------------------------------------------------------------

MAGNITUDES = (0.0, 1e-38, 1e-30, 1e-12, 1e-6, 1.0, 3e4, 1e15, 1e30)


def both_quantised(x: Tensor, fmt: Format, along: int | None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    granularity = ao.ScalingGranularity.TENSORWISE if along is None else ao.ScalingGranularity.AXISWISE
    theirs = float8_scaling_utils.hp_tensor_to_float8_dynamic(
        x,
        fmt.dtype,
        ao.LinearMMConfig(),
        scaling_granularity=granularity,
        axiswise_dim=along,
        round_scales_to_power_of_2=along is not None,  # as in the row-wise recipe
    )
    return quantise(x, fmt, along=along), (theirs._data, theirs._scale)


def assert_same(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    assert ours[0].dtype is theirs[0].dtype
    nan = theirs[0].float().isnan()  # the sign of a NaN means nothing
    assert torch.equal(ours[0].float().isnan(), nan)
    assert torch.equal(ours[0].view(torch.uint8)[~nan], theirs[0].view(torch.uint8)[~nan])
    assert same_bits([ours[1]], [theirs[1]])


@pytest.mark.parametrize("along", [None, 0, -1], ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_scales_and_operands_are_torchaos_to_the_bit(dtype: torch.dtype, fmt: Format, along: int | None) -> None:
    for number, size in enumerate(MAGNITUDES):
        for shape in ((16, 32), (7, 5), (1, 64), (64, 1)):
            x = (randn(*shape, seed=number).double() * size).to(dtype)
            x[0, 0] = 0.0
            ours, theirs = both_quantised(x, fmt, along)
            assert_same(ours, theirs)


@pytest.mark.parametrize("along", [None, -1], ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_scales_are_torchaos_where_they_are_about_to_change(fmt: Format, along: int | None) -> None:
    for exponent in range(-40, 41, 4):
        edge = torch.tensor(fmt.max * 2.0**exponent)
        for largest in (edge, edge.nextafter(edge * 2), edge.nextafter(edge / 2), edge * 1.5):
            x = randn(4, 8) * largest / 8
            x[1, 3] = -largest
            ours, theirs = both_quantised(x, fmt, along)
            assert_same(ours, theirs)


@pytest.mark.parametrize("along", [None, -1], ids=str)
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")], ids=str)
def test_what_is_not_finite_is_quantised_as_torchao_does(bad: float, along: int | None) -> None:
    x = randn(4, 8)
    x[2, 5] = bad
    ours, theirs = both_quantised(x, E5M2, along)
    assert_same(ours, theirs)
    assert not (ours[0].float() / ours[1]).isfinite().all()


def test_a_tensors_scale_is_the_quotient_rounded_once() -> None:
    x = randn(1, 4096).abs() + 0.01
    for fmt in (E4M3, E5M2):
        wanted = (fmt.max / x.double()).float().squeeze()
        assert torch.equal(torch.stack([quantise(v, fmt)[1] for v in x.squeeze()]), wanted)


# --- our emulation against torchao's: layers -------------------------------------------------------------------------

SHAPES = [((16,), 32, 48), ((7,), 16, 5), ((2, 33), 100, 17), ((64,), 256, 128), ((3, 2, 5), 24, 40), ((), 16, 16)]
SIZES = [(1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (1e-14, 1e-20), (3e4, 1e-6), (1e15, 1e8)]


def torchaos_layer(layer: nn.Linear, x: Tensor, start: Tensor, recipe: str) -> list[Tensor]:
    """Return the result and the gradients of input, weight and bias."""
    twin = ao.convert_to_float8_training(copy.deepcopy(layer), config=emulated_config(recipe))
    x = x.clone().requires_grad_()
    y = twin(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *twin.parameters()], start)]


def our_layer(layer: nn.Linear, x: Tensor, start: Tensor, recipe: str) -> list[Tensor]:
    x = x.clone().requires_grad_()
    with casting(f"fp8:fp8_recipe={recipe}").region():
        y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], start)]


def spread(*shape: int, seed: int) -> Tensor:
    """Return numbers over so wide a range that it shows along which dimension a scale was taken."""
    return randn(*shape, seed=seed) * 2 ** (-16 * torch.rand(shape, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_and_its_gradients_are_torchaos(
    recipe: str, rows: tuple[int, ...], inputs: int, outputs: int, bias: bool
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, bias=bias)
    layer.weight.data = spread(outputs, inputs, seed=3)
    same = total = 0
    for size, grad_size in SIZES:
        x = (spread(*rows, inputs, seed=1) * size).to(BF16)
        start = (spread(*rows, outputs, seed=2).double() * grad_size).to(BF16)
        for ours, theirs in zip(
            our_layer(layer, x, start, recipe), torchaos_layer(layer, x, start, recipe), strict=True
        ):
            assert ours.dtype is theirs.dtype
            apart = ulps(ours.to(BF16), theirs.to(BF16))  # FP32 gradients of weights are BF16 values, too
            assert same_bits([ours], [ours.to(BF16).to(ours.dtype)])
            near = (ours.double() - theirs.double()).abs() <= 1e-6 * theirs.double().abs().max()
            assert ((apart <= 1) | near).all()
            same, total = same + int((apart == 0).sum()), total + ours.numel()
    assert same >= 0.997 * total


def test_the_recipes_differ_where_they_should() -> None:
    x, w = randn(16, 32).to(BF16), randn(8, 32)
    x[3] *= 2.0**20  # row-wise, this costs row 3 only
    wide = x.double() @ w.double().T
    errors = {
        r: ((float8_linear(x, w, recipe=r).double() - wide).abs().amax(-1) / wide.abs().amax(-1)) for r in RECIPES
    }
    assert (errors["tensorwise"][[0, 1, 2, 4]] > 0.5).all()  # rounded to zero next to row 3
    assert (errors["rowwise"] < 0.1).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_emulation_keeps_for_the_backward_pass_what_torchao_keeps(recipe: str) -> None:
    layer = nn.Linear(32, 48, bias=False)
    x = randn(16, 32).to(BF16).requires_grad_()
    twin = ao.convert_to_float8_training(copy.deepcopy(layer), config=emulated_config(recipe))
    with saved_bytes() as theirs:
        twin(x)
    with saved_bytes() as ours, casting(f"fp8:fp8_recipe={recipe}").region():
        layer(x)
    assert ours["bytes"] == theirs["bytes"] == 16 * 32 * 2 + 48 * 32 * 4  # the input in BF16; the parameter itself


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_with_one_dimension_and_empty_batches(recipe: str) -> None:
    region = casting(f"fp8:fp8_recipe={recipe}").region
    x, w, b = randn(6, 16).requires_grad_(), randn(16).requires_grad_(), randn(1)[0].requires_grad_()
    with region():
        y = F.linear(x, w, b)
        wide = F.linear(x, w[None], b[None])
    assert same_bits([y], [wide.squeeze(-1)])
    ours, theirs = torch.autograd.grad(y.sum(), [x, w, b]), torch.autograd.grad(wide.sum(), [x, w, b])
    assert same_bits(ours, theirs)
    empty, weight = torch.zeros(0, 16, requires_grad=True), randn(4, 16).requires_grad_()
    with region():
        none = F.linear(empty, weight)
    assert none.shape == (0, 4)
    assert same_bits(torch.autograd.grad(none.sum(), [empty, weight]), [torch.zeros(0, 16), torch.zeros(4, 16)])


# --- torchao's layers in a session ---------------------------------------------------------------------------------


@pytest.fixture
def fp8_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this CPU pass for a device with FP8 units: torchao computes their products in FP32."""
    monkeypatch.setattr(Policy, "arithmetic_on", lambda self, device: ("native", "the test says so"))
    monkeypatch.setattr(low_layers, "float8_config", lambda policy: emulated_config(policy.fp8_recipe))


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small layers count as large enough to gain."""
    monkeypatch.setattr(low_layers, "_too_small", lambda outputs, inputs, recipe: False)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3))


def data(count: int, *, size: int = 16) -> list[Batch]:
    return batches(count, size=size, width=16)


def kinds(model: nn.Module) -> list[str]:
    return [type(m).__name__ for m in model.modules() if isinstance(m, nn.Linear)]


BUILDS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
}
ONE_PASS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "mezzo SGD": lambda p: mezzo.SGD(p, lr=0.05, momentum=0.9),
    "mezzo AdamW": lambda p: mezzo.AdamW(p, lr=1e-2),
}


@pytest.mark.usefixtures("fp8_units", "any_size")
@pytest.mark.parametrize("size", [16, 10], ids=["", "odd batch"])
@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_ten_updates_match_direct_use_of_torchao_to_the_bit(recipe: str, name: str, size: int) -> None:
    theirs, ours = network(), network()
    ao.convert_to_float8_training(
        theirs, config=emulated_config(recipe), module_filter_fn=lambda _, name: name in ("0", "3")
    )
    optimizer = BUILDS[name](list(theirs.parameters()))
    for x, y in data(10, size=size):
        hidden = F.relu(theirs[0](x.to(BF16)))
        hidden = F.relu(theirs[3](theirs[2](hidden.float()).to(BF16)))
        logits = F.linear(hidden, theirs[5].weight.to(BF16), theirs[5].bias.to(BF16))
        optimizer.zero_grad()
        F.cross_entropy(logits, y).float().backward()  # its log_softmax is in BF16, as under CUDA's autocast
        optimizer.step()
    session = Session(ours, BUILDS[name](list(ours.parameters())), policy=f"fp8:fp8_recipe={recipe}")
    train(session, ours, data(10, size=size))
    assert kinds(ours) == kinds(theirs) == ["Float8Linear", "Float8Linear", "Linear"]
    assert same_bits(parameters(ours), parameters(theirs))
    assert not same_bits(parameters(ours), parameters(network()))


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize(
    ("recipe", "name", "casts"),
    [
        *((recipe, name, "") for recipe in RECIPES for name in (*BUILDS, *ONE_PASS)),
        *(("tensorwise", name, ":casting=model:master_weights=true") for name in ("SGD", "mezzo AdamW")),
        ("rowwise", "AdamW", ":casting=model"),
    ],
)
def test_emulation_trains_as_torchaos_layers_to_the_bit(
    recipe: str, name: str, casts: str, request: pytest.FixtureRequest, recwarn: pytest.WarningsRecorder
) -> None:
    policy = f"fp8:fp8_recipe={recipe}{casts}:fp32_modules=5"  # the last layer, which only emulation takes in FP8
    models = [network(), network()]
    for number, model in enumerate(models):
        if number == 1:
            request.getfixturevalue("fp8_units")
        build = {**BUILDS, **ONE_PASS}[name]
        session = Session(model, build(list(model.parameters())), policy=policy, clip_norm=1.0, accumulate=2)
        train(session, model, data(12))
    assert kinds(models[0]) == ["Linear"] * 3
    assert kinds(models[1]) == ["Float8Linear", "Float8Linear", "Linear"]
    if casts:
        assert models[1][0].weight.dtype is BF16
    assert same_bits(parameters(models[0]), parameters(models[1]))
    assert {w.category for w in recwarn} <= {PrecisionWarning}  # of the updates that bf16 weights without masters lose


@pytest.mark.usefixtures("fp8_units", "any_size")
def test_a_layer_stays_the_object_that_everyone_knows() -> None:
    model = network()
    first, weight, seen = model[0], model[0].weight, []
    first.register_forward_hook(lambda module, args, result: seen.append(result.dtype))
    first.remark, names = "mine", list(model.state_dict())
    model.eval()
    state = torch.get_rng_state()
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp8")
    assert torch.equal(torch.get_rng_state(), state)
    assert model[0] is first
    assert (first.weight is weight, first.remark, first.training) == (True, "mine", False)
    assert list(model.state_dict()) == names
    with session.autocast():
        model(data(1)[0][0])
    assert seen == [BF16]


@pytest.mark.usefixtures("fp8_units", "any_size")
def test_copies_compute_the_same() -> None:
    model = network()
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp8")
    copies = [copy.deepcopy(model), through_a_file(model, weights_only=False)]
    x = data(1)[0][0]
    with session.autocast():
        wanted, found = model(x), [c(x) for c in copies]
    assert kinds(copies[0]) == kinds(copies[1]) == kinds(model)
    assert same_bits(found, [wanted, wanted])
    copies[0][0].weight.data.zero_()  # a copy computes with its own weight
    with session.autocast():
        assert not same_bits([copies[0](x)], [wanted])


@pytest.mark.usefixtures("fp8_units", "any_size")
def test_a_second_session_takes_over_the_layers() -> None:
    x, model = data(1)[0][0], network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Session(model, optimizer, policy="fp8")
    again = Session(model, optimizer, policy="fp8:fp8_recipe=rowwise")
    fresh = network()
    wanted = Session(fresh, torch.optim.SGD(fresh.parameters(), lr=0.1), policy="fp8:fp8_recipe=rowwise")
    with again.autocast(), wanted.autocast():
        assert same_bits([model(x)], [fresh(x)])
    assert again.explain() == wanted.explain()


@pytest.mark.usefixtures("fp8_units", "any_size")
def test_a_state_goes_over_to_other_policies_and_back() -> None:
    def built(policy: str) -> tuple[Session, nn.Module]:
        model = network()
        return Session(model, mezzo.AdamW(model.parameters(), lr=1e-2), policy=policy), model

    session, model = built("fp8")
    train(session, model, data(5))
    state = copy.deepcopy(session.state_dict())
    assert state["models"][0].keys() == network().state_dict().keys()
    assert {t.dtype for t in state["models"][0].values()} == {FP32}
    train(session, model, data(5))
    again, resumed = built("fp8")
    again.load_state_dict(state)
    train(again, resumed, data(5))
    assert same_bits(parameters(resumed), parameters(model))
    wide, wide_model = built("fp32")
    wide.load_state_dict(state)
    assert same_bits(parameters(wide_model), list(state["models"][0].values()))


# --- where a layer computes in FP8 and where it does not -----------------------------------------------------------


@pytest.mark.usefixtures("fp8_units", "any_size")
def test_outside_the_region_a_layer_computes_as_before() -> None:
    plain, model = network(), network()
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp8")
    x = data(1)[0][0]
    assert same_bits([model(x)], [plain(x)])
    with session.autocast():
        with torch.autocast("cpu", enabled=False):
            assert same_bits([model(x)], [plain(x)])
        assert model[0](x.to(BF16)).dtype is BF16
        assert not torch.equal(model[0](x).float(), plain[0](x.to(BF16).float()))
        none = model[0](input=torch.zeros(0, 16))
    assert (none.shape, none.dtype) == ((0, 32), BF16)
    model.double()
    with session.autocast():
        assert same_bits([model[0](x.double())], [plain.double()[0](x.double())])


@pytest.mark.usefixtures("fp8_units", "any_size")
@pytest.mark.parametrize("rows", [(16,), (3,), (2, 5), (), (4, 4), (1, 1)], ids=str)
def test_products_get_rows_in_multiples_of_16(rows: tuple[int, ...]) -> None:
    layer = nn.Linear(16, 32)
    seen = []

    def call(x: Tensor) -> Tensor:
        seen.append(x.shape[:-1].numel())
        return F.linear(x.float(), layer.weight, layer.bias).to(BF16)

    x = randn(*rows, 16).to(BF16).requires_grad_()
    with torch.autocast("cpu", dtype=BF16):
        y = native_units.in_float8(call, layer, BF16, x)
    assert seen == [16]
    assert same_bits([y], [F.linear(x.float(), layer.weight, layer.bias).to(BF16)])
    start = randn(*rows, 32, seed=1).to(BF16)
    found = torch.autograd.grad(y, [x, layer.weight, layer.bias], start)
    wanted = [start.float() @ layer.weight, start.float().reshape(-1, 32).T @ x.float().reshape(-1, 16)]
    torch.testing.assert_close(found[0].float(), wanted[0], rtol=2**-7, atol=1e-2)
    torch.testing.assert_close(found[1], wanted[1])
    torch.testing.assert_close(found[2], start.float().reshape(-1, 32).sum(0))


@pytest.mark.usefixtures("fp8_units", "any_size")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_computed_again_in_fp8(reentrant: bool) -> None:
    x, y = data(1)[0]
    found = []
    for wrapped in (False, True):
        model = network()
        session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp8")
        given = x.clone().requires_grad_()
        with session.autocast():
            out = checkpoint(model, given, use_reentrant=reentrant) if wrapped else model(given)
            loss = F.cross_entropy(out, y)
        with session.casting.backward():
            found.append(gradients(loss, model))
    assert same_bits(*found)


@pytest.mark.usefixtures("fp8_units", "any_size")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it traces
@pytest.mark.parametrize(("units", "recipe"), [(True, "rowwise"), (False, "tensorwise")], ids=["torchao", "emulated"])
def test_compiled_models_compute_the_same(units: bool, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not units:
        monkeypatch.undo()
    model = network()
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=f"fp8:fp8_recipe={recipe}")
    assert session.casting.emulates is not units
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x, y = data(1)[0]
    found = []
    for run in (model, compiled):
        with session.autocast():
            loss = F.cross_entropy(run(x), y)
        found.append(gradients(loss, model))
    torch._dynamo.reset()
    assert same_bits(*found)


@pytest.mark.usefixtures("fp8_units", "any_size")
def test_operations_count_as_fp8() -> None:
    model, (x, y) = network(), data(1)[0]
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp8")
    with FlopCounter(in_region=lambda: True) as counter:
        with session.autocast():
            loss = F.cross_entropy(model(x.requires_grad_()), y)
        session.step(loss)
    assert dict(counter.by_format) == {"e4m3": 3 * 2 * 16 * (16 * 32 + 32 * 16), "bf16": 3 * 2 * 16 * 16 * 3}


# --- which layers, and why the others not --------------------------------------------------------------------------


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class Blocks(nn.Module):
    """Layers of every kind that is chosen or left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.ModuleList([nn.Linear(16, 1040) for _ in range(3)])
        self.long = nn.Linear(4112, 16)
        self.blocks = nn.ModuleList(
            [nn.ModuleDict({"up": nn.Linear(16, 64), "down": nn.Linear(64, 16)}) for _ in range(2)]
        )
        self.odd = nn.Linear(17, 1040)
        self.attention = nn.MultiheadAttention(16, 2)
        self.scaled = Scaled(16, 1040)
        self.kept = nn.Sequential(nn.Linear(16, 1040))
        self.own = nn.Linear(16, 1040)
        self.own.forward = lambda input: input  # type: ignore[method-assign]
        self.wide = nn.Linear(16, 1040).double()
        self.head = nn.Linear(16, 1040)


SMALL = "too small to gain: no more than 1024 outputs and 4096 inputs (torchao's measurements on H100s)"
OWN = "it has code of its own, which a layer in fewer bits would not run"
LEFT = [
    ("2 x blocks.*.up (16 to 64), 2 x blocks.*.down (64 to 16)", SMALL),
    ("odd (17 to 1040)", "a size is not a multiple of 16, which FP8 matrix units require"),
    ("attention.out_proj (16 to 16), scaled (16 to 1040), own (16 to 1040)", OWN),
    ("kept.0 (16 to 1040)", "the policy keeps it in FP32"),
    ("wide (16 to 1040)", "its weight is in a format that is never cast"),
    ("head (16 to 1040)", "the last linear layer: its errors reach the loss undamped"),
]


@pytest.mark.usefixtures("fp8_units")
def test_layers_left_alone_and_why() -> None:
    model = Blocks()
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp8:fp32_modules=kept")
    chosen = [name for name, m in model.named_modules() if type(m).__name__ == "Float8Linear"]
    assert chosen == ["large.0", "large.1", "large.2", "long"]
    assert [c for c in session.explain() if "fp8" in c.what and c.what != "fp8 recipe"] == [
        Choice(
            what="fp8 layers",
            value="4 of 15 linear layers",
            reason="torchao's tensorwise recipe on the GPU's units",
        ),
        *(Choice(what="not in fp8", value=value, reason=reason) for value, reason in LEFT),
    ]


def test_an_emulated_session_says_what_a_gpu_would_do() -> None:
    model = Blocks()
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp8:fp32_modules=kept")
    assert [c for c in session.explain() if c.what == "fp8 layers"] == [
        Choice(
            what="fp8 layers",
            value="all linear layers",
            reason="emulation has no shapes to avoid; on a GPU with FP8 units 4 of 15 linear layers would compute in FP8",
        )
    ]
    assert "Float8Linear" not in kinds(model)
    plain = network()
    session = Session(plain, torch.optim.SGD(plain.parameters(), lr=0.1), policy="bf16")
    assert not [c for c in session.explain() if "fp8" in c.what]


@pytest.mark.parametrize("recipe", RECIPES)
def test_sizes_that_gain_are_those_of_torchaos_filter(recipe: str) -> None:
    takes = ao._auto_filter_for_recipe(recipe, [])
    edges = [16, 1008, 1024, 1040, 2048, 2064, 4096, 4112, 8192, 1000]
    with torch.device("meta"):
        layers = [nn.Linear(inputs, outputs) for inputs in edges for outputs in edges]
    Policy.parse(f"fp8:fp8_recipe={recipe}")
    ours = [
        low_layers.fault_of_sizes(layer.out_features, layer.in_features, TABLE[recipe, "ocp"]) is None
        for layer in layers
    ]
    assert ours == [takes(layer, "") for layer in layers]
    assert 0 < sum(ours) < len(ours)


@pytest.mark.usefixtures("fp8_units")
def test_a_model_without_any_layer_that_gains_warns() -> None:
    model = network()
    message = (
        "policy fp8 computes no linear layer in FP8 here, and all in bf16"
        f"; 0 (16 to 32), 3 (32 to 16): {SMALL}; 5 (16 to 3): {LEFT[-1][1]}"
    )
    with pytest.warns(PrecisionWarning, match=re.escape(message)) as caught:
        Session(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp8")
    assert caught[0].filename == __file__
    single = nn.Linear(16, 2048)
    with pytest.warns(PrecisionWarning, match=r"the model \(16 to 2048\): the last linear layer"):
        Session(single, torch.optim.SGD(single.parameters(), lr=0.1), policy="fp8")


@pytest.mark.usefixtures("any_size")
def test_without_torchao_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Policy, "arithmetic_on", lambda self, device: ("native", "the test says so"))
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    model = network()
    with pytest.raises(UnsupportedFormatError) as caught:
        Session(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp8")
    assert caught.value.message.startswith(
        "policy fp8 computes linear layers in FP8 with torchao, which cannot be imported ("
    )
    assert caught.value.hint == (
        "pip install 'torchao>=0.18'; or set arithmetic=emulated for FP8's numerics without its speed, or use policy bf16"
    )
    assert kinds(model) == ["Linear"] * 3


def test_emulation_needs_no_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    model = network()
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp8")
    train(session, model, data(2))
    assert session.updates == 2


@pytest.mark.usefixtures("fp8_units", "any_size")
def test_a_launched_scripts_model_computes_in_fp8_and_the_rest_is_on_record() -> None:
    model = network()
    run = TorchRun(Policy.parse("fp8"))
    assert run.record_root(model, ()) == "cpu"
    assert kinds(model) == ["Float8Linear", "Float8Linear", "Linear"]
    assert [(r.what, r.value) for r in run.notes.left_alone.values()] == [("not in fp8", "5 (16 to 3)")]


# --- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="needs a GPU of compute capability 9.0, which has FP8 units",
)
@pytest.mark.parametrize("rows", [64, 50], ids=["", "odd batch"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpus_units_compute_what_the_emulation_says(recipe: str, rows: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, 2064, device="cuda")
    start = torch.randn(rows, 3, device="cuda")
    found = []
    for arithmetic in ("native", "emulated"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2064, 4112), nn.Linear(4112, 2064), nn.Linear(2064, 3)).cuda()
        policy = f"fp8:fp8_recipe={recipe}:arithmetic={arithmetic}:fp32_modules=2"
        session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy)
        assert kinds(model).count("Float8Linear") == (2 if arithmetic == "native" else 0)
        with session.autocast():
            y = model(x)
        found.append([y, *torch.autograd.grad(y, list(model.parameters()), start)])
    for native, emulated in zip(*found, strict=True):
        assert (native - emulated).norm() <= 0.02 * emulated.norm()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # the compiler does, while it traces
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_linear_layers_compile_with_dynamic_shapes(recipe: str) -> None:
    """Outside any region, so the emulation itself is traced: a global number in it was a variable that could not be lifted."""
    first, second = randn(8, 8).requires_grad_(), randn(8, 8).requires_grad_()
    linear = functools.partial(float8_linear, recipe=recipe)

    def net(x: Tensor) -> Tensor:
        return linear(linear(x.to(BF16), first), second)

    torch.compiler.reset()
    compiled = torch.compile(net, backend="aot_eager", dynamic=True, fullgraph=True)
    for batch in (3, 5):
        x = randn(batch, 8)
        expected = torch.autograd.grad(net(x).float().sum(), [first, second])
        assert same_bits(torch.autograd.grad(compiled(x).float().sum(), [first, second]), expected)
