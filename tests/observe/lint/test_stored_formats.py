"""What the samples of weights and state show, at the limits: counts by hand, and every BF16 number as the oracle of weight decay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mezzo.launch.torch import switched

BF16, FP32 = torch.bfloat16, torch.float32


def details(
    net: nn.Linear, optimizer: Callable[..., torch.optim.Optimizer], step: Callable[[Tensor], None]
) -> dict[str, str]:
    """Return what is said of four updates by code; ``step`` sets the gradient, or the weight, before each."""
    with switched(None) as (run, _):
        opt = optimizer(net.parameters())
        net(torch.ones(1, net.in_features, dtype=net.weight.dtype))
        for _ in range(4):
            step(net.weight)
            opt.step()
    return {finding.code: finding.detail for finding in run.lint.findings()}


def keeps_every_number(factor: float) -> bool:
    """Return whether a factor leaves every normal BF16 number as it is."""
    numbers = torch.arange(0x0080, 0x7F80, dtype=torch.int16).view(BF16)
    return bool(((numbers.float() * factor).to(BF16) == numbers).all())


@pytest.mark.parametrize("decay", [2.0**-9 * 0.99, 2.0**-9 * 1.01, 2.0**-12, 2.0**-8])
def test_decay_is_lost_exactly_where_no_number_feels_it(decay: float) -> None:
    def step(weight: Tensor) -> None:
        weight.grad = torch.full_like(weight, 0.5)

    net = nn.Linear(8, 8, bias=False).to(BF16)
    said = details(net, lambda p: torch.optim.AdamW(p, lr=1.0, betas=(0.9, 0.95), weight_decay=decay), step)
    lost = keeps_every_number(1 - decay)
    assert lost is (decay < 2.0**-9)
    assert said == (
        {"A633": f"weight decay of AdamW multiplies BF16 weights by {1 - decay:.8g}, which rounding undoes"}
        if lost
        else {}
    )


@pytest.mark.parametrize(("num_still", "share"), [(64, "100%"), (48, "75%"), (47, ""), (0, "")])
def test_weights_stand_still_below_half_a_unit(num_still: int, share: str) -> None:
    """Below 1 a unit of BF16 is 2^-8, so 2^-10 is lost and 2^-7 is not."""

    def step(weight: Tensor) -> None:
        weight.grad = torch.full_like(weight, 2.0**-7)
        weight.grad.view(-1)[:num_still] = 2.0**-10

    net = nn.Linear(8, 8, bias=False).to(BF16)
    nn.init.ones_(net.weight)
    said = details(net, lambda p: torch.optim.SGD(p, lr=1.0), step)
    expected = f"SGD updates BF16 weights, and of a sample with gradients {share} of weight stand still"
    assert said == ({"A633": expected} if share else {})


@pytest.mark.parametrize("gradient", [0.0, float("nan"), float("inf")])
def test_weights_without_a_finite_gradient_prove_nothing(gradient: float) -> None:
    def step(weight: Tensor) -> None:
        weight.grad = torch.full_like(weight, gradient)

    net = nn.Linear(8, 8, bias=False).to(BF16)
    assert details(net, lambda p: torch.optim.SGD(p, lr=0.0 if gradient else 1.0), step) == {}


@pytest.mark.parametrize(
    ("num_wide", "num_changed", "found"), [(0, 64, True), (1, 64, False), (0, 8, True), (0, 7, False)]
)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_number_with_more_digits_acquits(dtype: torch.dtype, num_wide: int, num_changed: int, found: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def step(weight: Tensor) -> None:
        numbers = 1.5 + 0.25 * torch.rand(num_changed, generator=generator)
        weight.data.view(-1)[:num_changed] = numbers.to(dtype).float() + 2.0**-20 * (
            torch.arange(num_changed) < num_wide
        )
        weight.grad = torch.zeros_like(weight)

    net = nn.Linear(8, 8, bias=False)
    said = details(net, lambda p: torch.optim.SGD(p, lr=1.0), step)
    name = "BF16" if dtype is BF16 else "FP16"
    assert said == (
        {"A629": f"weight: FP32, but the inspected updates of SGD left only numbers of {name}"} if found else {}
    )


def test_zeros_and_powers_of_two_prove_nothing() -> None:
    counts = iter(range(1, 9))

    def step(weight: Tensor) -> None:
        weight.data.fill_(2.0 ** -next(counts))
        weight.grad = torch.zeros_like(weight)

    assert details(nn.Linear(8, 8, bias=False), lambda p: torch.optim.SGD(p, lr=1.0), step) == {}
