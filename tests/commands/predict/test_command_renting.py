"""Prices by GPU, what a million samples cost, and the lines for Slurm."""

from __future__ import annotations

import pytest

from mezzo.commands.predict.command import cost_per_million, prices_of, slurm_lines
from mezzo.errors import UsageError
from mezzo.gpus import gpu_named
from mezzo.records import Prediction

CARDS = [gpu_named("t4"), gpu_named("h100")]


@pytest.mark.parametrize(
    ("text", "prices"),
    [
        (None, {}),
        ("2.10", {"t4": 2.1, "h100-sxm": 2.1}),
        ("h100=2.5", {"h100-sxm": 2.5}),
        ("H100=2.5,t4=.3", {"h100-sxm": 2.5, "t4": 0.3}),
    ],
)
def test_prices(text: str | None, prices: dict[str, float]) -> None:
    assert prices_of(text, CARDS) == prices


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cheap", "'cheap' where a price for an hour belongs; allowed: a number above 0"),
        ("-1", "'-1' where a price"),
        ("inf", "'inf' where a price"),
        ("t4=", "'' where a price"),
        ("h101=2", "--price 'h101' is not a GPU"),
        ("a100=2", "a price for a100-80gb, which --gpus does not name"),
    ],
)
def test_bad_prices(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        prices_of(text, CARDS)


def test_a_million_samples_at_a_thousand_a_second_take_1000_seconds() -> None:
    assert cost_per_million(1000.0, 3.6) == pytest.approx(1.0)


def test_slurm_lines() -> None:
    one = Prediction(gpu="h100-sxm", policy="bf16", possible=True, device_bytes=30 * 2**30)
    lines, assumed = slurm_lines(gpu_named("h100"), one)
    assert "#SBATCH --gres=gpu:h100:1" in lines
    assert "#SBATCH --mem=40G" in lines  # 30 + 8, in steps of 8
    assert [reason.what for reason in assumed] == ["--gres", "--mem", "--cpus-per-task", "--time"]
