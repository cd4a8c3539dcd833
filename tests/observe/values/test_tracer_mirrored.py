"""Mirrored rounding: by how much it moves values, and which it leaves alone; what an operation's event says."""

from __future__ import annotations

import math
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from helpers_diff import place, values_of
from mezzo.engine.kernels import cpu
from mezzo.observe.values import tracer as traced
from mezzo.observe.values.fingerprints import Fingerprints
from mezzo.observe.values.log import Event, ValuesLog, distances

MODEL = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(3, 2, bias=False)
x = torch.randn(5, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
STEP = "model(x).pow(2).sum().backward()\noptimizer.step()\n"


def operations(text: str, **settings: object) -> list[Event]:
    log = values_of(MODEL + text, steps=(1,), **settings)  # type: ignore[arg-type]
    return [event for event in log.events if event.kind in ("operation", "cast")]


def mirrored(compute: Callable[[], Tensor], draws: int) -> Tensor:
    """Return the results of as many draws of mirrored rounding errors, one a row."""
    found = []
    for seed in range(draws):
        with mock.patch.object(traced, "_SEED", seed):
            results: list[Tensor] = []
            run(lambda results=results: results.append(compute()))  # type: ignore[misc]
            found.append(results[0].detach().double())
    return torch.stack(found)


def run(compute: Callable[[], object]) -> None:
    """Run a function inside the tracer, in a module."""
    from mezzo.callables import _trained
    from mezzo.observe.settings import ValuesSettings

    class Model(torch.nn.Module):
        def forward(self) -> object:
            return compute()

    def train() -> None:
        Model()()

    _trained(train, None, ValuesSettings(steps=(1,), mirrored=True, seed=0), [])


X, W = (
    torch.randn(4, 32, generator=torch.Generator().manual_seed(1)),
    torch.randn(32, 4, generator=torch.Generator().manual_seed(2)),
)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("compute", "unit"),
    [(lambda x, w: x @ w, 2.0**-24), (lambda x, w: x + w.t(), 2.0**-8), (lambda x, w: x.exp(), 2.0**-24)],
    ids=["a product", "a sum in bf16", "a function"],
)
def test_the_mean_over_draws_is_the_exact_value(
    compute: Callable[[Tensor, Tensor], Tensor], unit: float, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(cpu, "takes_values", lambda tensor: False)
    x, w = (X.bfloat16(), W.bfloat16()) if unit == 2.0**-8 else (X, W)
    exact, rounded = compute(x.double(), w.double()), compute(x, w).double()
    draws = mirrored(lambda: compute(x, w), 60)
    bias = draws.mean(0) - exact
    assert bool(
        (bias.abs() <= 4 * draws.std(0) / 60**0.5 + unit * exact.abs()).all()
    )  # what is mirrored is rounded again
    assert abs((bias / exact).mean()) < 3 * (bias / exact).std() / bias.numel() ** 0.5 + 1e-9
    assert bool(((draws - exact).abs() <= (rounded - exact).abs() + 2 * unit * exact.abs()).all())
    assert 0.1 < float((draws != rounded).double().mean()) < 0.5


@pytest.mark.parametrize(
    "compute",
    [
        lambda: torch.ones(64) + 1,
        lambda: torch.arange(64.0).reshape(8, 8) @ torch.eye(8),
        lambda: X.relu(),
        lambda: X.double() * 2,
        lambda: torch.arange(64) // 3,
        lambda: X.new_full((2,), float("inf")) + 1,
    ],
    ids=["ones", "a product", "relu", "fp64", "integers", "infinite"],
)
def test_results_without_an_error_stay(compute: Callable[[], Tensor]) -> None:
    assert bool((mirrored(compute, 3) == compute().double()).all())


def test_the_same_seed_mirrors_the_same_elements() -> None:
    a, b = (values_of(MODEL + STEP, steps=(1,), mirrored=True) for _ in range(2))
    plain = values_of(MODEL + STEP, steps=(1,))
    assert a.hashes.tolist() == b.hashes.tolist() != plain.hashes.tolist()


def test_mirroring_changes_no_random_numbers() -> None:
    text = (
        MODEL
        + "x = torch.nn.functional.dropout(x, 0.5)\n"
        + STEP
        + "y = torch.rand(3)\nmodel(y).sum().backward()\noptimizer.step()\n"
    )
    drawn = [
        [log.hashes[event.row] for event in log.events if event.op == "rand"]
        for log in (values_of(text), values_of(text, mirrored=True))
    ]
    assert drawn[0] == drawn[1] != []


def test_errors_are_those_of_single_operations() -> None:
    found = operations(
        "with torch.autocast('cpu', torch.bfloat16):\n    model(x).float().pow(2).sum().backward()\noptimizer.step()\n",
        in_fp64=True,
        policy=None,
    )
    errors = {f"{event.op} {event.phase}": event.error for event in found}
    product = errors["mm forward"]
    assert product is not None
    assert 2.0**-12 < product < 2.0**-8
    assert errors["pow forward"] < 2.0**-22  # type: ignore[operator]
    assert {event.error for event in operations(STEP)} == {None}


def test_emulated_products_have_rounded_results() -> None:
    log = values_of(MODEL + STEP, steps=(1,), policy="bf16")
    (product,) = [event for event in log.events if event.op == "mm" and event.phase == "forward"]
    torch.manual_seed(0)
    weight = torch.nn.Linear(3, 2, bias=False).weight.bfloat16().float()
    rounded = (torch.randn(5, 3).bfloat16().float() @ weight.t()).bfloat16()
    expected = Fingerprints()
    assert product.outputs == (expected.add(rounded),)
    assert log.hashes[product.row] == expected.read()[0][0]
    assert product.flops == 2 * 5 * 3 * 2


def test_an_event_says_what_was_computed() -> None:
    events = operations("y = model(x)\n(y[1:3] * 2.5).sum().backward()\noptimizer.step()\n")
    product, scaled, summed, *_ = events
    assert [place(event) for event in events[:3]] == [
        "mm Linear forward 1",
        "mul (script) forward 1",
        "sum (script) forward 1",
    ]
    assert scaled.settings == ("2.5",)
    assert [(read.event, read.part) for read in scaled.reads] == [(2, (2, 2, 2))]
    assert (product.flops, scaled.flops, summed.outputs[0].shape) == (60, 0, ())
    assert scaled.line.endswith("train.py:10")


def test_arguments_by_name_are_named() -> None:
    found = operations(
        "y = model(x)\n(y.sum(dim=1, keepdim=True, dtype=torch.float64)).sum().backward()\noptimizer.step()\n"
    )
    assert found[1].settings == ("[1]", "True", "dtype=float64")


def test_gradients_and_updates_have_names_and_settings() -> None:
    log = values_of(MODEL + STEP, steps=(1,))
    gradient, update = (next(e for e in log.events if e.kind == kind) for kind in ("gradient", "update"))
    assert (gradient.module, gradient.phase) == ("weight", "backward")
    assert (update.op, update.module, update.phase) == ("SGD", "weight", "update")
    assert {"lr=0.1", "momentum=0", "weight_decay=0"} <= set(update.settings)


def test_running_statistics_are_results_of_their_norm() -> None:
    text = MODEL.replace("nn.Linear(3, 2, bias=False)", "nn.BatchNorm1d(3)") + "%s" + STEP
    trained, evaluated = (operations(text % line)[0:2] for line in ("", "model.eval()\n"))
    assert [output.shape for output in next(e for e in trained if e.op == "batch_norm").outputs] == [
        (5, 3),
        *[(3,)] * 4,
    ]
    assert [output.shape for output in next(e for e in evaluated if e.op == "batch_norm").outputs] == [(5, 3)]


def test_a_workspace_is_no_result() -> None:
    text = MODEL.replace("nn.Linear(3, 2, bias=False)", "nn.LSTM(3, 2)") + STEP.replace("model(x)", "model(x)[0]")
    a, b = values_of(text, steps=(1,)), values_of(text, steps=(1,))
    assert all(output.format != "uint8" for event in a.events for output in event.outputs)
    assert all(not distances(a, b, n, n).any() for n in range(len(a.events)))


def test_an_error_of_the_loss_is_measured() -> None:
    text = MODEL + "torch.nn.functional.cross_entropy(model(x), torch.zeros(5).long()).backward()\noptimizer.step()\n"
    log: ValuesLog = values_of(text, steps=(1,), in_fp64=True)
    (loss,) = [event for event in log.events if event.op == "nll_loss" and event.phase == "forward"]
    assert len(loss.outputs) == 1
    assert loss.error is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_compiled_kernel_gives_the_opposite_error(dtype: torch.dtype) -> None:
    """Half of the elements move, to one of the two numbers beside the opposite; sums of squares are the exact ones."""
    exact = torch.randn(3001, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact[:4] = torch.tensor([0.0, 1.0, 2.0**-24, -(2.0**-24)])  # 2^-24 is FP16's smallest number
    rounded = exact.to(dtype)
    result = rounded.clone()
    apart, whole = cpu.errors(result, exact, seed=7)
    assert apart == pytest.approx(float((rounded.double() - exact).square().sum()), rel=1e-12)
    assert whole == pytest.approx(float(exact.square().sum()), rel=1e-12)
    moved = result != rounded
    opposite = 2 * exact - rounded.double()
    unit = opposite.abs().log2().floor().exp2() * torch.finfo(dtype).eps
    assert bool(((result.double() - opposite).abs() <= unit)[moved].all())
    assert not bool(moved[rounded.double() == exact].any())
    assert 0.2 < float(moved.double().mean()) < 0.3  # half of the halves round back
    again = rounded.clone()
    assert cpu.errors(again, exact) == (apart, whole)
    assert torch.equal(again, rounded)


@pytest.mark.parametrize(
    ("value", "exact"),
    [(65504.0, 65519.9), (math.inf, 65504.0), (math.inf, math.inf), (math.nan, 1.0), (1.0, math.nan)],
)
def test_the_compiled_kernel_makes_nothing_infinite(value: float, exact: float) -> None:
    result = torch.full((64,), value, dtype=torch.float16)
    cpu.errors(result, torch.full((64,), exact, dtype=torch.float64), seed=1)
    assert bool((result.isnan() if math.isnan(value) else result == value).all())
