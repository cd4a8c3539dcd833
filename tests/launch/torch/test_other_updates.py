"""Updates that a script leaves out by itself, against torch's GradScaler; and passes with dropped gradients that are no updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mezzo.launch.torch import switched
from mezzo.policy import Policy

POLICY = Policy.parse("fp16:op_lists=device:init_scale=65536")
FACTOR = 1e3
"""Times the loss: its gradients overflow in FP16 at the first scales."""


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=1e-6)


def batch(step: int) -> Tensor:
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int) -> Tensor:
    return model(batch(step)).float().square().mean() * FACTOR


def by_grad_scaler(steps: int) -> tuple[list[float], list[Tensor]]:
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu")
    scales = []
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model, step)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, [p.detach().clone() for p in model.parameters()]


def finite(model: nn.Module) -> bool:
    return all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def to_none(model: nn.Module) -> None:
    model.zero_grad()


def to_zero(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def to_none_by_hand(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


def zeroed_through_data(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data.zero_()


@pytest.mark.parametrize("drop", [to_none, to_zero, to_none_by_hand, zeroed_through_data])
@pytest.mark.parametrize("when", ["before the pass", "when left out"])
def test_an_update_that_the_script_leaves_out_lowers_the_scale_as_under_grad_scaler(
    drop: Callable[[nn.Module], None], when: str
) -> None:
    scales, weights = by_grad_scaler(20)
    assert len(set(scales)) > 3  # the case is one: several updates are skipped
    with switched(POLICY) as (run, _):
        model, optimizer = made()
        for step in range(20):
            if when == "before the pass":
                drop(model)
            loss_of(model, step).backward()
            if finite(model):
                optimizer.step()
                drop(model)
            elif when == "when left out":
                drop(model)
    steps = run.update.recorder.steps()
    assert steps.loss_scale == scales
    assert steps.skipped == [after < before for before, after in zip([65536.0, *scales], scales, strict=False)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), weights, strict=True))


def test_an_overflow_at_a_scale_that_has_fitted_is_seen_from_the_second_one_on() -> None:
    with switched(POLICY.replace(init_scale=1.0)) as (run, _):
        model, optimizer = made()
        for step in range(160):
            optimizer.zero_grad()
            (loss_of(model, step) * (1e36 if step in (50, 60, 70, 130, 131) else 1.0)).backward()
            if finite(model):
                optimizer.step()
    # Steps 50 (the first) and 130 (unscaled in one batch) are not seen: each counts as one with the step after it, as under python.
    assert [number for number, skipped in enumerate(run.update.recorder.steps().skipped, start=1) if skipped] == [
        60,
        70,
        130,
    ]
    assert len(run.update.recorder.steps()) == 158
    assert run.precision.scale.value() == 2.0**-3


def test_two_updates_that_are_each_left_out() -> None:
    with switched(POLICY) as (run, _):
        models, left_out = [made(), made()], [0, 0]
        for step in range(20):
            for number, (model, optimizer) in enumerate(models):
                optimizer.zero_grad()
                if number == 0:
                    (loss_of(model, step) * 4.0).backward()
                else:
                    loss_of(model, step).backward()
                if finite(model):
                    optimizer.step()
                else:
                    left_out[number] += 1
    steps = run.update.recorder.steps()
    assert left_out[0] > left_out[1] > 0
    assert (len(steps), steps.num_skipped) == (40, sum(left_out))
    assert len(steps.losses) == 2


def test_a_pass_before_another_of_the_same_update_is_no_update() -> None:
    with switched(POLICY) as (run, _):
        model, optimizer = made()
        for step in range(20):  # two passes an update, as in sharpness-aware training
            loss_of(model, step).backward()
            to_none(model)
            loss_of(model, step).backward()
            optimizer.step()
            to_none(model)
    assert len(run.update.recorder.steps()) == 20
    assert run.update.recorder.steps().loss_scale == by_grad_scaler(20)[0]


def test_an_accumulated_window_is_one_update() -> None:
    with switched(POLICY) as (run, _):
        model, optimizer = made()
        for step in range(40):
            loss_of(model, step).backward()
            if step % 2:
                optimizer.step()
                to_none(model)
    assert len(run.update.recorder.steps()) == 20


def test_gradients_that_the_script_makes_finite_are_skipped_as_under_grad_scaler() -> None:
    scales, weights = by_grad_scaler(20)
    with switched(POLICY) as (run, _):
        model, optimizer = made()
        for step in range(20):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            for p in model.parameters():
                torch.nan_to_num_(p.grad, 0.0, 0.0, 0.0)  # type: ignore[type-var]
            optimizer.step()
    assert run.update.recorder.steps().loss_scale == scales
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), weights, strict=True))


@pytest.mark.parametrize("policy", [None, POLICY.replace(init_scale=1.0)])
def test_passes_that_no_step_follows_are_as_under_python(policy: Policy | None) -> None:
    def train() -> Any:
        model, optimizer = made()
        for step in range(12):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if step % 3:
                optimizer.step()
        return [p.detach() for p in model.parameters()]

    with switched(policy) as (run, _):
        found = train()
    assert run.update.recorder.steps().num_skipped == 0
    if policy is None:
        assert all(torch.equal(a, b) for a, b in zip(found, train(), strict=True))


def test_a_trial_before_the_optimizer_that_overflows_is_forgotten() -> None:
    with switched(POLICY.replace(init_scale=1.0)) as (run, _):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        for _ in range(2):
            (F.mse_loss(model(torch.ones(2, 4)), torch.zeros(2, 1)) * 1e36).backward()
            to_none(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
    assert (len(run.update.recorder.steps()), run.update.recorder.steps().num_skipped) == (3, 0)
