"""Backward passes of a script that has no optimizer yet, or never makes one: which count as updates."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from helpers_launch import run_record
from mezzo.launch.torch import switched
from mezzo.launch.torch.state import TorchRun
from mezzo.observe.fallback.observer import Fallback
from mezzo.observe.nonfinite.observer import NonFinite
from mezzo.observe.ranges.observer import Ranges
from mezzo.observe.settings import (
    AnySettings,
    AuditSettings,
    DiagnoseSettings,
    FallbackSettings,
    RangesSettings,
    StopScript,
)
from mezzo.policy import Policy
from mezzo.records import AuditRecord


def model_of(seed: int = 0) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.randn(16, 4)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def backward(model: nn.Module, x: Tensor) -> None:
    loss_of(model, x).backward()
    model.zero_grad()


def gradients(model: nn.Module, x: Tensor) -> None:
    torch.autograd.grad(loss_of(model, x), list(model.parameters()))


def of_inputs(model: nn.Module, x: Tensor) -> None:
    given = x.clone().requires_grad_()
    torch.autograd.grad(model(given).sum(), given)


def jacobian(model: nn.Module, x: Tensor) -> None:
    torch.autograd.functional.jacobian(model, x[:2])


def hessian(model: nn.Module, x: Tensor) -> None:
    torch.autograd.functional.hessian(lambda given: loss_of(model, given), x[:2])


def vjp(model: nn.Module, x: Tensor) -> None:
    torch.autograd.functional.vjp(model, x[:2], torch.ones(2, 2))


def func_grad(model: nn.Module, x: Tensor) -> None:
    values = {name: p.detach() for name, p in model.named_parameters()}
    torch.func.grad(lambda v: torch.func.functional_call(model, v, (x,)).square().mean())(values)


def func_jacrev(model: nn.Module, x: Tensor) -> None:
    torch.func.jacrev(model)(x[:2])


def traced(model: nn.Module, x: Tensor) -> None:
    loss_of(torch.jit.trace(model, x), x).backward()  # type: ignore[no-untyped-call]
    model.zero_grad()


def gradchecked(model: nn.Module, x: Tensor) -> None:
    torch.autograd.gradcheck(torch.sin, (torch.randn(3, dtype=torch.float64, requires_grad=True),))


TRIALS = {
    backward: 2,
    gradients: 2,
    of_inputs: 2,
    jacobian: 8,
    hessian: 16,
    vjp: 2,
    func_grad: 0,
    func_jacrev: 0,
    traced: 2,
    gradchecked: 0,
}
"""How many passes each makes that could be an update's, called twice."""


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("policy", [None, "bf16", "fp16"])
@pytest.mark.parametrize("trial", TRIALS, ids=lambda one: one.__name__)
def test_passes_before_the_first_optimizer_that_change_no_weight_are_no_steps(
    trial: Callable[[nn.Module, Tensor], None], policy: str | None
) -> None:
    with switched(None if policy is None else Policy.parse(policy)) as (run, counted):
        model, x = model_of()
        trial(model, x)
        trial(model, x)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        expected = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = loss_of(model, x)
            expected.append(loss.item())
            loss.backward()
            optimizer.step()
    steps, effective = run.update.recorder.steps(), counted.effective()
    assert steps.loss == pytest.approx(expected)
    assert steps.loss_scale == ([65536.0] * 5 if policy == "fp16" else [])
    notes = [(one.what, one.value) for one in effective.left_alone if one.what in ("update", "backward passes")]
    assert notes == ([("backward passes", f"{TRIALS[trial]} before the optimizer")] if TRIALS[trial] else [])
    assert effective.counted_on_step == 2
    name = {None: "fp32", "bf16": "bf16", "fp16": "fp16"}[policy]
    assert effective.flops_by_format == {name: 2 * 16 * (2 * 4 * 8 + 3 * 8 * 2)}


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad


def through_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.sub_(0.1 * p.grad)


def new_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data - 0.1 * p.grad


@pytest.mark.parametrize("update", [in_place, through_data, new_data])
@pytest.mark.parametrize("then", [0, 5], ids=["never an optimizer", "then an optimizer"])
def test_updates_by_hand_are_steps(update: Callable[[nn.Module], None], then: int) -> None:
    with switched(Policy.parse("bf16")) as (run, counted):
        model, x = model_of()
        for _ in range(4):
            model.zero_grad()
            loss_of(model, x).backward()
            update(model)
        if then:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(then):
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()
    losses = run.update.recorder.steps().loss
    assert len(losses) == 4 + then
    assert sorted(losses, reverse=True) == losses
    assert [(one.what, one.value) for one in counted.effective().left_alone] == [("update", "by hand")]


def test_a_trial_is_a_step_where_no_optimizer_is_ever_made() -> None:
    with switched(None) as (run, _):
        backward(*model_of())
    assert len(run.update.recorder.steps()) == 1


# --- under an observer ---------------------------------------------------------------------------------------------------------


def forward_only(model: nn.Module, x: Tensor) -> None:
    model(1000 * x)


def forward_without_gradients(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model(1000 * x)


def many(model: nn.Module, x: Tensor) -> None:
    for _ in range(5):
        backward(model, 1000 * x)


def nothing(model: nn.Module, x: Tensor) -> None:
    """Train without trying the model first."""


def trains(trial: Callable[[nn.Module, Tensor], None]) -> None:
    model, x = model_of()
    trial(model, x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()


def forward_first(trial: Callable[[nn.Module, Tensor], None]) -> None:
    """Make the optimizer between the first forward pass and its backward pass."""
    model, x = model_of()
    trial(model, x)
    loss = loss_of(model, x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss = loss_of(model, x)


RUN = run_record("as-is")


def audited(run: TorchRun) -> object:
    assert run.listeners.observer is not None
    record = run.listeners.observer.record(RUN)
    assert isinstance(record, AuditRecord)
    return record.steps, [(one.op, one.module, one.phase, one.count, one.flops) for one in record.operations]


def counted_ranges(run: TorchRun) -> object:
    assert isinstance(run.listeners.observer, Ranges)
    return run.listeners.observer.watched, run.listeners.observer._tables.read()


def evidence(run: TorchRun) -> object:
    assert isinstance(run.listeners.observer, NonFinite)
    return run.listeners.observer.evidence(RUN)


def measured(run: TorchRun) -> object:
    assert isinstance(run.listeners.observer, Fallback)
    kept = {
        step: {name: g.tolist() for name, g in found.items()}
        for step, found in run.listeners.observer._recorded.items()
    }
    return (
        run.listeners.observer.watched,
        kept,
        [(one.module, one.output, one.flops) for one in run.listeners.observer._measured.local],
    )


OBSERVED: dict[str, tuple[AnySettings, Callable[[TorchRun], object]]] = {
    "audit": (AuditSettings(steps=(1, 2)), audited),
    "ranges": (RangesSettings(steps=(1, 2)), counted_ranges),
    "diagnose": (DiagnoseSettings(steps=(1, 2, 3)), evidence),
    "fallback": (FallbackSettings(steps=(1, 2)), measured),
}


def observed(kind: str, script: Callable[..., None], trial: Callable[[nn.Module, Tensor], None]) -> object:
    settings, found = OBSERVED[kind]
    with switched(None, observe=settings) as (run, _), suppress(StopScript):
        script(trial)
    return found(run)


@pytest.mark.parametrize("trial", [backward, many, gradients, jacobian, forward_only, forward_without_gradients])
@pytest.mark.parametrize("kind", OBSERVED)
def test_an_observer_sees_the_steps_of_the_training_alone(
    kind: str, trial: Callable[[nn.Module, Tensor], None]
) -> None:
    assert observed(kind, trains, trial) == observed(kind, trains, nothing)


@pytest.mark.parametrize("kind", ["audit", "ranges"])
def test_a_forward_pass_before_the_optimizer_belongs_to_the_step_that_uses_it(kind: str) -> None:
    assert observed(kind, forward_first, nothing) == observed(kind, trains, nothing)


@pytest.mark.parametrize("update", [in_place, through_data, new_data])
@pytest.mark.parametrize("kind", OBSERVED)
def test_an_observer_ends_a_training_without_an_optimizer_after_its_last_step(
    kind: str, update: Callable[[nn.Module], None]
) -> None:
    passes = 0
    settings, _ = OBSERVED[kind]
    with switched(None, observe=settings) as (run, _), suppress(StopScript):
        model, x = model_of()
        for _ in range(8):
            passes += 1
            model.zero_grad()
            loss_of(model, x).backward()
            update(model)
    assert run.listeners.observer is not None
    assert run.listeners.observer.watched == list(settings.steps)
    late = (kind, update) == ("fallback", through_data)  # until its last step, it makes gradients 0: no value changes
    assert passes == len(settings.steps) + 1 + late
