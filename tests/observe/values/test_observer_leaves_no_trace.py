"""An observer of values leaves the process as it was."""

from __future__ import annotations

import torch
from torch import nn

from mezzo.callables import _trained
from mezzo.observe.settings import ValuesSettings


def test_deterministic_kernels_are_off_again_after_a_run() -> None:
    seen = []

    def train() -> None:
        model = nn.Linear(2, 2)
        model(torch.randn(3, 2)).sum().backward()
        seen.append(torch.are_deterministic_algorithms_enabled())

    _trained(train, None, ValuesSettings(steps=(1,), deterministic=True), [])
    assert (seen, torch.are_deterministic_algorithms_enabled()) == ([True], False)
