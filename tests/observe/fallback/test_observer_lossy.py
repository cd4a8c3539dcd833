"""The first matrix product that loses its digits is named with its line; those of healthy models are not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import mezzo
from helpers_launch import observed_record
from helpers_values import existing
from mezzo.observe.fallback.evidence import LossyProduct, read_measured
from mezzo.observe.fallback.observer import lost
from mezzo.observe.settings import FallbackSettings
from mezzo.policy import Policy

OFFSET = 65536.0


@pytest.mark.parametrize(
    ("exact", "found", "share"),
    [
        ([[65536.0], [65538.0]], [[65536.0], [65536.0]], 1.0),  # one number for both
        ([[1.0], [3.0]], [[1.0], [2.0]], 0.5),
        ([[1.0, 5.0], [1.0, 5.0]], [[1.5, 5.5], [1.5, 5.5]], 0.0),  # rows are equal, and columns differ as they did
        ([[1e6], [1e6 + 1]], [[1e6], [1e6]], 0.0),  # a difference of FP32's own rounding
        ([[1.0], [3.0]], [[float("inf")], [3.0]], 0.0),
        ([[2.0]], [[3.0]], 0.0),
    ],
)
def test_the_share_of_the_differences_that_is_wrong(
    exact: list[list[float]], found: list[list[float]], share: float
) -> None:
    assert lost(torch.tensor(exact), torch.tensor(found)) == pytest.approx(share)


class Rotated(nn.Module):
    """A layer whose input is turned by angles of far positions, multiplied by ``product``."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.product = nn.Linear(4, 8), nn.Linear(8, 4), product

    def forward(self, x: Tensor) -> Tensor:
        positions = OFFSET + torch.arange(float(x.shape[1]))
        angles = self.product(positions[:, None], 100.0 ** -torch.linspace(0, 1, 8)[None])
        return self.down(self.up(x) * angles.cos())


def trainer(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], None]:
    def train() -> None:
        torch.manual_seed(0)
        model = Rotated(product)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            x = torch.randn(2, 16, 4, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x).backward()
            optimizer.step()

    return train


def of_matmul(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def elementwise(a: Tensor, b: Tensor) -> Tensor:
    return a * b


LINE = f"{__file__}:{inspect.getsourcelines(of_matmul)[1] + 1}"


def measured(train: Callable[[], None], policy: str, folder: Path) -> LossyProduct | None:
    settings = FallbackSettings(steps=(1,), policy=Policy.parse(policy), folder=str(folder))
    observed_record(train, "fp32", settings)
    return read_measured(settings).lossy


def test_a_product_of_far_positions_is_named_at_its_line(tmp_path: Path) -> None:
    found = existing(measured(trainer(of_matmul), "bf16", tmp_path))
    assert (found.line, found.lost) == (LINE, pytest.approx(1.0, rel=1e-4))


def test_products_that_keep_their_digits_are_not(tmp_path: Path) -> None:
    assert measured(trainer(elementwise), "bf16", tmp_path) is None


@pytest.mark.slow
def test_the_answer_of_a_search_has_the_line() -> None:
    record = mezzo.fallback(trainer(of_matmul), policy="bf16")
    assert (record.verdict, record.operations) == ("elsewhere", ["matmul"])
    assert f"the first product that BF16 cannot hold is at {LINE}" in record.reason
