"""Commands on a function, called where earlier runs left their models and optimizers on the heap, as in a notebook."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo import callables


@pytest.fixture(autouse=True)
def _earlier() -> Iterator[torch.optim.Optimizer]:
    """An optimizer with state and huge gradients, from a run that is over."""
    weight = nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.full((1000,), 1e30)
    optimizer.step()
    yield optimizer
    assert weight.grad is not None


class Saturates(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 400
        return torch.where((y * y).isinf(), x, x * 5)  # up to 4e5, beyond FP16


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), Saturates(), nn.Linear(16, 4))


def _loss(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(32, 8, generator=generator), torch.randn(32, 4, generator=generator)
    return F.mse_loss(model(x), y)


def test_gradients_of_an_earlier_training_are_not_weighed() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def train() -> None:
        optimizer.zero_grad()
        _loss(model).backward()
        optimizer.step()

    record = mezzo.diagnose(train, policy="fp16:loss_scale=static:init_scale=16", steps=1)
    assert record.verdict == "silent_saturation"


@pytest.mark.parametrize(("warmup", "device_type"), [(0, "meta"), (1, "cpu")])
def test_without_a_warmup_the_optimizers_know_the_device(warmup: int, device_type: str) -> None:
    """What ran in the warmup decides; before anything ran, an optimizer on another device than the CPU does."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2, device="meta"))])
    model = _model()
    assert callables._warmed_up(lambda: _loss(model), warmup) == device_type
    del optimizer


def test_weights_that_are_updated_by_hand_still_are() -> None:
    weight = torch.ones(4, requires_grad=True)

    def train() -> None:
        for _ in range(3):
            (weight * torch.ones(4)).square().sum().backward()
            with torch.no_grad():
                assert weight.grad is not None
                weight.sub_(0.01 * weight.grad)
                weight.grad = None

    assert len(mezzo.ranges(train).run.steps) == 3


def test_an_optimizer_that_is_first_reached_in_a_later_backward_pass_counts() -> None:
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, two)]

    def train() -> None:
        for model, optimizer in zip((one, two), optimizers, strict=True):
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).square().mean().backward()
                optimizer.step()

    assert len(mezzo.ranges(train).run.steps) == 10


def test_parameters_inside_reentrant_checkpointing_are_trained_by_their_optimizer() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            x = torch.ones(2, 4, requires_grad=True)
            checkpoint(model, x, use_reentrant=True).square().mean().backward()
            optimizer.step()

    record = mezzo.ranges(train).run
    assert len(record.steps) == 3
    assert [one.what for one in record.effective.left_alone] == []


def test_the_record_says_what_to_do_about_an_error_of_the_function() -> None:
    model = _model()
    found = mezzo.diagnose(lambda: (_loss(model) * float("inf")).backward())
    assert found.run.error == "the loss is inf before the first update"
    assert found.run.hint.startswith("no loss scale can help")
