"""Wrong updates that other libraries make, each found by running them; here they are right."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import mezzo

FP16 = "fp16:init_scale=256"


def linear(value: float = 0.5) -> nn.Linear:
    model = nn.Linear(4, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def test_two_optimizers_are_unscaled_once() -> None:
    """Fabric 2.6.6 and Accelerate 1.15.0 update the scaler after each optimizer: the second one's gradients are divided twice."""
    models = [linear(), linear()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in models]
    session = mezzo.Session(models, optimizers, policy=FP16, clip_norm=1e6)
    inputs = torch.ones(2, 4)
    with session.autocast():
        loss = sum((m(inputs).mean() for m in models), torch.zeros(()))
    session.step(loss)
    for model in models:
        assert torch.equal(model.weight.detach(), torch.full((1, 4), -0.5))  # 0.5 - 1.0 * 1


def test_a_short_last_window_is_the_mean_of_its_micro_batches() -> None:
    """Accelerate and Lightning divide a window of 2 of 4 micro-batches by 4: half the gradient."""
    model = linear()
    session = mezzo.Session(model, torch.optim.SGD(model.parameters(), lr=1.0), policy=FP16, accumulate=4)
    for scale in (1.0, 3.0):
        with session.autocast():
            loss = model(torch.full((2, 4), scale)).mean()
        session.step(loss)
    session.update()
    assert torch.equal(model.weight.detach(), torch.full((1, 4), 0.5 - 2.0))


def test_a_scheduler_waits_on_a_skipped_step() -> None:
    """Lightning's Trainer halves the rate while the first steps overflow and nothing is updated."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    session = mezzo.Session(model, optimizer, policy="fp16:init_scale=16777216", scheduler=schedule)
    rates = []
    for _ in range(12):
        with session.autocast():
            loss = model(torch.full((2, 4), 100.0)).mean()
        session.step(loss)
        rates.append(optimizer.param_groups[0]["lr"])
    assert session.skipped > 3
    assert rates == [0.5] * session.skipped + [0.5 ** (1 + i) for i in range(1, 13 - session.skipped)]


def test_fp16_on_a_cpu_really_is_fp16() -> None:
    """Accelerate(cpu=True, mixed_precision="fp16") says fp16 and computes in FP32, without a warning."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1 + 2.0**-12)  # rounds to 1 in FP16
    session = mezzo.Session(model, torch.optim.SGD(model.parameters(), lr=1.0), policy="fp16")
    with session.autocast():
        out: Tensor = model(torch.full((1, 1), 3.0))
    assert out.dtype is torch.float16
    assert out.item() == 3.0
    assert any("emulated" in c.value or "fp16" in c.value for c in session.explain())


def test_bf16_weights_that_cannot_move_are_reported_and_masters_move() -> None:
    """Fabric's bf16-true moves 0 of 4096 weights of 1.0 in 100 AdamW steps at 1e-4, and says nothing."""

    def train(policy: str) -> Tensor:
        model = nn.Linear(64, 64, bias=False)
        nn.init.ones_(model.weight)
        session = mezzo.Session(model, torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0), policy=policy)
        torch.manual_seed(0)
        for _ in range(100):
            with session.autocast():
                loss = model(torch.rand(8, 64)).square().mean()
            session.step(loss)
        return model.weight.detach()

    with pytest.warns(mezzo.PrecisionWarning, match="100% of 4096 weights did not change in the first update"):
        stuck = train("bf16-pure")
    assert bool((stuck == 1).all())
    moved = train("bf16-master")
    assert moved.dtype is torch.bfloat16
    assert bool((moved < 1).all())


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_nan_is_not_hidden(policy: str) -> None:
    """Hugging Face's Trainer replaces a NaN loss in its log by the mean of earlier ones."""
    model = linear()
    session = mezzo.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=f"{policy}:init_scale=256")
    for value in (1.0, math.nan):
        with session.autocast():
            loss = model(torch.full((1, 4), value)).mean()
        session.step(loss)
    assert math.isnan(session.grad_norm)
    assert session.skipped == (1 if policy == "fp16" else 0)
    assert bool(model.weight.isfinite().all()) == (policy == "fp16")
