"""What the noise run of a fallback search changes, and what it must leave: its values go on through the script's own code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mezzo
from mezzo.formats import FP32
from mezzo.observe.fallback.observer import Fallback
from mezzo.observe.settings import FallbackSettings

BELOW_1 = 1.0 - FP32.eps / 2


@pytest.mark.parametrize("value", [1.0, -1.0, BELOW_1, -BELOW_1, 0.5, -0.25, 0.0])
def test_values_up_to_1_stay_so(value: float) -> None:
    run: Any = None
    moved = Fallback(FallbackSettings(role="noise"), run)._perturbed_tensor(torch.full((1000,), value), eps=FP32.eps)
    assert float(moved.abs().max()) <= 1
    assert float((moved - value).abs().max()) <= 2 * FP32.eps * abs(value)
    if abs(value) not in (0.0, BELOW_1):  # just below 1, half of the moves round back
        assert bool((moved != value).all())


def test_probabilities_of_0_and_1_can_be_compared() -> None:
    class Certain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(100 * self.linear(x))

    def train() -> None:
        torch.manual_seed(0)
        model = Certain()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            p = model(torch.randn(64, 8))
            nn.functional.binary_cross_entropy(p, torch.full_like(p, 0.5)).backward()
            optimizer.step()

    assert mezzo.fallback(train, policy="bf16").run.error is None  # torch refuses a probability beyond 1
