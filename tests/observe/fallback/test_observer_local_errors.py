"""The error that a module makes by itself, against operands rounded by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from helpers_backward import BOTH_WAYS
from helpers_in_blocks import in_mxfp8
from helpers_values import existing
from mezzo.observe.fallback.evidence import LocalError, fitting_scale
from mezzo.observe.fallback.observer import Bench, Calls, FirstCall, differentiable, relative_error
from mezzo.observe.one_module import TorchModule, for_single_modules
from mezzo.policy import Policy


def called(module: nn.Module, *inputs: Tensor) -> FirstCall:
    """Return the kept call of ``module``, after a backward pass."""
    calls = Calls()
    calls.entering(module, inputs)
    output = module(*inputs)
    calls.returned(module, inputs, {}, output)
    sum((t.sin().sum() for t in differentiable(output)), torch.zeros(())).backward()
    return calls.first[module]


def measured_call(call: FirstCall, policy: str, *models: nn.Module) -> LocalError:
    chosen = Policy.parse(policy)
    return Bench(chosen, TorchModule(chosen, "cpu", models=models)).measure([call], {call.module: ("it", False)})[0]


def measured(module: nn.Module, *inputs: Tensor, policy: str = "fp16") -> LocalError:
    return measured_call(called(module, *inputs), policy)


def normal(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


@BOTH_WAYS
@pytest.mark.parametrize(("policy", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_a_linear_layer_loses_what_rounding_takes(policy: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(32, 24), normal(40, 32)
    call = called(module, x)
    found = measured_call(call, policy)
    gradient = existing(call.gradients[0])

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.detach().to(dtype).double()

    low = rounded(rounded(x) @ rounded(module.weight).T + rounded(module.bias))
    exact = x.double() @ module.weight.double().T + module.bias.double()
    assert found.output == pytest.approx(relative_error([exact], [low]), rel=1e-3)
    low = (
        rounded(rounded(gradient * 2**10) @ rounded(module.weight)) / 2**10
    )  # any power of two at which nothing is lost
    exact = gradient.double() @ module.weight.double()
    assert found.dgrad == pytest.approx(relative_error([exact], [low]), rel=0.02)
    assert found.wgrad == pytest.approx(torch.finfo(dtype).eps / 4, rel=0.6)
    assert found.flops == 3 * 2 * 40 * 32 * 24
    assert found.module == "it"
    assert not found.reason


KEPT_PRODUCTS = [("", ()), ("forward", ("output",)), ("wgrad", ("wgrad",)), ("dgrad+0.wgrad", ("dgrad", "wgrad"))]


@pytest.mark.parametrize(("kept", "in_bf16"), KEPT_PRODUCTS)
def test_a_layer_by_itself_computes_in_blocks_as_in_its_model(kept: str, in_bf16: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(64, 96, bias=False), normal(128, 64)
    call = called(module, x)
    dy, w = existing(call.gradients[0]), module.weight
    policy = "mxfp8:end_layers=compute" + (f":bf16_products=0.{kept}" if kept else "")
    found = measured_call(call, policy, nn.Sequential(module))

    blocks = {
        "output": (x.double() @ w.double().T, in_mxfp8(x, along=1) @ in_mxfp8(w, along=1).T),
        "dgrad": (dy.double() @ w.double(), in_mxfp8(dy, along=1) @ in_mxfp8(w, along=0)),
        "wgrad": (dy.double().T @ x.double(), in_mxfp8(dy, along=0).T @ in_mxfp8(x, along=0)),
    }
    for product, (exact, low) in blocks.items():
        error = getattr(found, product)
        if product in in_bf16:
            assert error < 0.004
        else:
            assert error == pytest.approx(relative_error([exact], [low.bfloat16().double()]), rel=1e-3)
            assert error > 0.02
    assert "forward" not in vars(module)


BLOCKS_OF_MODELS = [
    ("mxfp8", [False, True, False]),  # the ends stay in BF16
    ("mxfp8:end_layers=compute", [True, True, True]),
    ("mxfp8:bf16_products=1.*", [False, False, False]),
    ("nvfp4:fp32_modules=1+other", [False, False, False]),  # a module of another model may be named
    ("fp8", [True, True, True]),  # operation by operation, also in single modules
    ("bf16", [False, False, False]),
]


@pytest.mark.parametrize(("policy", "coarse"), BLOCKS_OF_MODELS)
def test_which_layers_of_a_model_compute_in_few_bits_by_themselves(policy: str, coarse: list[bool]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    errors = [measured_call(called(layer, normal(64, 64)), policy, model).output for layer in model]
    assert [existing(error) > 0.02 for error in errors] == coarse


def test_a_container_runs_its_layers_in_fp32_in_blocks_too() -> None:
    torch.manual_seed(0)
    model = Container(nn.Linear(64, 64), torch.sin)
    assert existing(measured_call(called(model, normal(64, 64)), "mxfp4:end_layers=compute", model).output) == 0


ALONE: list[tuple[str, str]] = [
    ("fp16-master", "fp16-master:casting=ops:master_weights=false"),
    ("fp16:init_scale=8:fp32=gelu:fp32_modules=a", "fp16:init_scale=8:fp32=gelu"),
    ("bf16:reduce=bf16:world=4:reduce_order=tree", "bf16"),
    ("fp32", "fp32"),
    ("tf32", "tf32"),
    ("fp8:fp8_recipe=rowwise:op_lists=device", "fp8:fp8_recipe=rowwise:arithmetic=emulated"),
    ("nvfp4:scale_rule=four_or_six:bf16_products=*.wgrad", "nvfp4:scale_rule=four_or_six:arithmetic=emulated"),
    (
        "mxfp4:hadamard=wgrad:gradient_rounding=stochastic",
        "mxfp4:hadamard=wgrad:gradient_rounding=stochastic:arithmetic=emulated",
    ),
    ("fp8-block:fp8_formats=fnuz", "fp8-block:fp8_formats=fnuz:arithmetic=emulated"),
]


@pytest.mark.parametrize(("policy", "alone"), ALONE)
def test_the_policy_of_single_modules_keeps_how_operations_compute(policy: str, alone: str) -> None:
    assert for_single_modules(Policy.parse(policy)) == Policy.parse(alone)


class Container(nn.Module):
    def __init__(self, inside: nn.Module, own: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inside, self.own = inside, own

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.inside(x))


def squeezed(x: Tensor) -> Tensor:
    return (x * 1e-9) * 1e9


class Squeezing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return squeezed(x)


@BOTH_WAYS
def test_a_container_answers_for_what_it_computes_itself() -> None:
    torch.manual_seed(0)
    healthy = measured(Container(Squeezing(), torch.sin), normal(8, 4))
    faulty = measured(Container(nn.Linear(4, 4), squeezed), normal(8, 4))
    assert healthy.worst < 1e-6
    assert healthy.rounded < 1e-3
    assert faulty.worst < 1e-6
    assert faulty.rounded == math.inf  # 1e9 times a scaled gradient
    assert measured(Squeezing(), normal(8, 4)).rounded == math.inf


@BOTH_WAYS
def test_what_has_no_gradient_has_no_error_of_one() -> None:
    no_weights, no_gradient = measured(Squeezing(), normal(8, 4)), measured(nn.Linear(4, 4), normal(8, 4, grad=False))
    assert (no_weights.wgrad, no_gradient.dgrad) == (None, None)
    assert no_weights.dgrad is not None
    assert no_gradient.wgrad is not None


@BOTH_WAYS
def test_what_a_run_by_itself_leaves_behind() -> None:
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5))
    call = called(module, normal(8, 4))
    before = {name: (value.clone(), value._version) for name, value in module.state_dict(keep_vars=True).items()}
    numbers = torch.get_rng_state()
    found = measured_call(call, "bf16")
    for name, value in module.state_dict(keep_vars=True).items():
        assert torch.equal(value, before[name][0])
        assert value._version == before[name][1]  # a graph may have saved it
    assert torch.equal(torch.get_rng_state(), numbers)
    assert found.worst < 1e-6  # the same dropout mask in every run
    assert [name for name, inner in module.named_modules() if "forward" in vars(inner)] == []


@BOTH_WAYS
def test_inputs_changed_in_place_are_kept_as_they_came() -> None:
    x = normal(8, 4)
    call = called(nn.ReLU(inplace=True), x * 1)
    assert torch.equal(call.args[0], x)


def test_what_cannot_be_run_by_itself_says_why() -> None:
    class Once(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 1:
                raise ValueError("only once")
            return x * 2

    found = measured(Once(), normal(2, 2))
    assert (found.output, found.flops, found.reason) == (None, 0, "ValueError: only once")


@pytest.mark.parametrize(
    ("scale", "error"),
    [("loss_scale=none", 1 / 3), ("loss_scale=static:init_scale=2", 0.0), ("loss_scale=dynamic:init_scale=2", 0.0)],
)
def test_gradients_are_judged_at_the_policys_scale(scale: str, error: float) -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    gradient = torch.full((1, 1), 1.5 * 2.0**-24)  # at scale 1 it becomes 2 * 2**-24, at scale 2 nothing is lost
    call = FirstCall(module, (torch.ones(1, 1, requires_grad=True),), gradients=[gradient])
    found = measured_call(call, f"fp16:{scale}")
    assert (found.dgrad, found.wgrad) == (pytest.approx(error), pytest.approx(error))


ERRORS: list[tuple[list[float], list[float], float]] = [
    ([3.0, 4.0], [3.0, 4.5], 0.1),
    ([3.0, 4.0], [3.0, 4.0], 0.0),
    ([3.0], [math.nan], math.inf),
    ([3.0], [math.inf], math.inf),
    ([0.0], [0.0], 0.0),
    ([0.0], [1e-30], math.inf),
    ([1e-30], [2e-30], 1.0),
]


@pytest.mark.parametrize(("exact", "found", "error"), ERRORS)
def test_relative_errors(exact: list[float], found: list[float], error: float) -> None:
    assert relative_error([torch.tensor(exact)], [torch.tensor(found)]) == pytest.approx(error)


@pytest.mark.parametrize(
    ("largest", "most", "scale"),
    [
        (1.0, 65536.0, 2.0**14),
        (0.25, 65536.0, 65536.0),
        (0.26, 65536.0, 2.0**15),
        (2.0**20, 65536.0, 2.0**-6),
        (0.0, 8.0, 8.0),
        (math.inf, 8.0, 8.0),
        (math.nan, 8.0, 8.0),
    ],
)
def test_the_scale_that_fits(largest: float, most: float, scale: float) -> None:
    assert fitting_scale(largest, most) == scale
