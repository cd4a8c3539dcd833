"""What following lost values costs, counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from helpers_diagnose import diagnosed
from mezzo.observe import tensors


def _train(num_layers: int) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
        optimizer.step()
        # Past the observer: each layer's weights are found to be bad when it reads them.
        for parameter in model.parameters():
            parameter.data = torch.from_numpy(np.full(tuple(parameter.shape), np.nan, dtype=np.float32))


def test_storages_are_looked_up_in_proportion_to_the_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    original = tensors.storage

    def counted(tensor: torch.Tensor) -> Any:
        nonlocal calls
        calls += 1
        return original(tensor)

    monkeypatch.setattr(tensors, "storage", counted)
    found: list[int] = []
    for num_layers in (20, 80):
        calls = 0
        record = diagnosed("nan_weights", "bf16", tmp_path, steps=2, script=lambda n=num_layers: _train(n))  # type: ignore[misc]
        assert (record.verdict, record.step) == ("invalid_operation", 2)
        found.append(calls)
    assert found[1] < 5 * found[0], found
