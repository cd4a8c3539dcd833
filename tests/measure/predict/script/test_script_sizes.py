"""Sizes that depend on numbers, in a trace without numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers_predict import recorded
from mezzo.measure.predict.script.recorder import largest_sizes

SCRIPT = """
import torch
from torch import nn
edges = torch.randint(0, 16, (2, 40))
edges = edges[:, edges[0] != edges[1]]
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    out = model(torch.randn(16, 8))[edges[0]]
    loss = out[out[:, 0] > 0].square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "computed",
    [
        lambda x: x.nonzero(),
        lambda x: x[x > 2],
        lambda x: x[:, x[0] > 1],
        lambda x: x.masked_select(x.bool()),
        lambda x: x.unique(),
        lambda x: x.unique(return_inverse=True)[1],
        lambda x: x.flatten().unique_consecutive(return_counts=True)[1],
    ],
)
def test_a_size_is_that_of_numbers_that_keep_all(computed: Callable[[Tensor], Tensor]) -> None:
    """All of them are different and pass every condition; 3 to 8 are."""
    expected = computed(torch.arange(3, 9).reshape(2, 3))
    with FakeTensorMode() as mode, largest_sizes(lambda: None):
        found = computed(mode.from_tensor(torch.arange(3, 9).reshape(2, 3)))
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


def test_the_lines_are_kept(tmp_path: Path) -> None:
    assert recorded(tmp_path, SCRIPT, steps=2).sized_at == ["train.py:5", "train.py:10"]
