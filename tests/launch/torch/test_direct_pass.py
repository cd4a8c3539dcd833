"""A backward pass that goes straight to the engine, against ``torch.autograd.backward``: same gradients, or torch's own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.launch.torch.direct_pass import DirectPass

PLAIN = (None, False)
Pass = Callable[[Tensor], bool]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))


def loss_of(net: nn.Module) -> Tensor:
    loss: Tensor = net(torch.linspace(-1, 1, 12).reshape(3, 4)).square().mean()
    return loss


def gradients(net: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [(PLAIN, {"inputs": None}), ((False, False), {}), ((), {})],
    ids=["from Tensor.backward", "both off", "no arguments"],
)
@pytest.mark.parametrize("factor", [None, 1024.0])
def test_gradients_are_torchs(args: tuple[Any, ...], kwargs: dict[str, Any], factor: float | None) -> None:
    start = None if factor is None else torch.tensor(factor)
    theirs, ours, direct = model(), model(), DirectPass()
    if start is None:
        assert not direct(loss_of(ours), None, args, kwargs)  # the first pass only makes the gradient of the loss
    for _ in range(3):
        torch.autograd.backward(loss_of(theirs), start)
        assert direct(loss_of(ours), start, args, kwargs)
        for a, b in zip(gradients(theirs), gradients(ours), strict=True):
            assert torch.equal(a, b)


def with_hook(loss: Tensor) -> Tensor:
    loss.register_hook(lambda g: g.mul_(2))
    return loss


def with_retained_gradient(loss: Tensor) -> Tensor:
    loss.retain_grad()
    return loss


@pytest.mark.parametrize(
    ("change", "args", "kwargs"),
    [
        (lambda loss: loss, (True, False), {}),
        (lambda loss: loss, (None, True), {}),
        (lambda loss: loss, (), {"retain_graph": True}),
        (lambda loss: loss, PLAIN, {"inputs": []}),
        (Tensor.double, PLAIN, {}),
        (Tensor.detach, PLAIN, {}),
        (with_hook, PLAIN, {}),
        (with_retained_gradient, PLAIN, {}),
    ],
    ids=["keeps its graph", "creates a graph", "by name", "inputs", "float64", "no graph", "hook", "retain_grad"],
)
def test_anything_special_is_left_to_torch(change: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    net, direct = model(), DirectPass()
    direct(loss_of(net), None, PLAIN, {})
    assert not direct(change(loss_of(net)), None, args, kwargs)
    assert gradients(net) == []


def test_inside_a_transform_torch_refuses_the_pass() -> None:
    net, direct = model(), DirectPass()
    direct(loss_of(net), None, PLAIN, {})
    answers = []

    def inside(x: Tensor) -> Tensor:
        answers.append(direct(loss_of(net), None, PLAIN, {}))
        return x

    torch.func.vmap(inside)(torch.ones(2))
    assert answers == [False]


class WritesIntoItsGradient(torch.autograd.Function):
    """A function that changes the gradient it is given, which torch forbids and scripts do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.mul_(3)


def test_a_gradient_that_was_written_into_is_not_used_again() -> None:
    theirs, ours, direct = model(), model(), DirectPass()
    direct(loss_of(ours), None, PLAIN, {})
    assert direct(WritesIntoItsGradient.apply(loss_of(ours)), None, PLAIN, {})
    assert not direct(loss_of(ours), None, PLAIN, {})  # the next one is made
    assert direct(loss_of(ours), None, PLAIN, {})
    torch.autograd.backward(loss_of(theirs) * 3)
    torch.autograd.backward(loss_of(theirs))
    for a, b in zip(gradients(theirs), gradients(ours), strict=True):
        assert torch.equal(a, b)
