"""A backward pass that goes straight to the engine, against ``torch.autograd.backward``: same gradients, or torch's own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.engine.gradients import DirectPasses

PLAIN = (None, False)


class Passes(DirectPasses):
    """Passes that note whether torch prepared the last one."""

    def __init__(self) -> None:
        super().__init__(self._by_torch)
        self.by_torch = False

    def _by_torch(self, *args: Any, **kwargs: Any) -> None:
        self.by_torch = True
        torch.autograd.backward(*args, **kwargs)

    def direct(self, *args: Any, **kwargs: Any) -> bool:
        """Run a pass; return whether it went straight to the engine."""
        self.by_torch = False
        self(*args, **kwargs)
        return not self.by_torch


def begun(net: nn.Module) -> Passes:
    """Return passes of which the first, which torch prepares, is over."""
    passes = Passes()
    assert not passes.direct(loss_of(net))
    net.zero_grad()
    return passes


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
    theirs, ours = model(), model()
    passes = begun(ours)
    for _ in range(3):
        torch.autograd.backward(loss_of(theirs), start)
        assert passes.direct(loss_of(ours), start, *args, **kwargs)
        for a, b in zip(gradients(theirs), gradients(ours), strict=True):
            assert torch.equal(a, b)


def with_hook(loss: Tensor) -> Tensor:
    loss.register_hook(lambda g: g.mul_(2))
    return loss


def with_retained_gradient(loss: Tensor) -> Tensor:
    loss.retain_grad()
    return loss


class Named(Tensor):
    """A tensor of another class."""


SPECIAL: dict[str, tuple[Callable[[Tensor], Tensor], tuple[Any, ...], dict[str, Any]]] = {
    "keeps its graph": (lambda loss: loss, (True, False), {}),
    "keeps its graph, by name": (lambda loss: loss, (), {"retain_graph": True}),
    "float64": (Tensor.double, PLAIN, {}),
    "one element of one dimension": (lambda loss: loss.reshape(1), PLAIN, {}),
    "subclass": (lambda loss: loss.as_subclass(Named), PLAIN, {}),
    "hook": (with_hook, PLAIN, {}),
    "retain_grad": (with_retained_gradient, PLAIN, {}),
}


@pytest.mark.parametrize(("change", "args", "kwargs"), SPECIAL.values(), ids=SPECIAL)
def test_anything_special_is_left_to_torch(change: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    theirs, ours = model(), model()
    passes = begun(ours)
    torch.autograd.backward(change(loss_of(theirs)), None, *args, **kwargs)
    assert not passes.direct(change(loss_of(ours)), None, *args, **kwargs)
    for a, b in zip(gradients(theirs), gradients(ours), strict=True):
        assert torch.equal(a, b)


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], dict[str, Any], str]] = {
    "no graph": (Tensor.detach, {}, "does not require grad"),
    "no inputs": (lambda loss: loss, {"inputs": []}, "cannot be empty"),
}


@pytest.mark.parametrize(("change", "kwargs", "message"), REFUSED.values(), ids=REFUSED)
def test_what_torch_refuses_it_refuses(change: Any, kwargs: dict[str, Any], message: str) -> None:
    net = model()
    passes = begun(net)
    with pytest.raises(RuntimeError, match=message):
        passes(change(loss_of(net)), **kwargs)


def test_inside_a_transform_torch_refuses_the_pass() -> None:
    net = model()
    passes = begun(net)

    def inside(x: Tensor) -> Tensor:
        passes(loss_of(net))
        return x

    with pytest.raises(RuntimeError, match="inside a functorch transform"):
        torch.func.vmap(inside)(torch.ones(2))


class WritesIntoItsGradient(torch.autograd.Function):
    """A function that changes the gradient it is given, which torch forbids and scripts do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.mul_(3)


def test_a_gradient_that_was_written_into_is_not_used_again() -> None:
    theirs, ours = model(), model()
    passes = begun(ours)
    assert passes.direct(WritesIntoItsGradient.apply(loss_of(ours)))
    assert not passes.direct(loss_of(ours))  # the next one is made
    assert passes.direct(loss_of(ours))
    torch.autograd.backward(loss_of(theirs) * 3)
    for _ in range(2):
        torch.autograd.backward(loss_of(theirs))
    for a, b in zip(gradients(theirs), gradients(ours), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("retain_graph", [False, True])
@pytest.mark.parametrize("replaced", ["", "torch.autograd.backward", "torch.Tensor.backward"])
def test_other_tools_are_told_of_every_pass(replaced: str, retain_graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    net, told = model(), []
    passes = Passes()
    for _ in range(2):
        passes.from_loss(loss_of(net), retain_graph=False)
    net.zero_grad()
    passes.by_torch = False
    if replaced:
        home, name = (torch.autograd if "autograd" in replaced else Tensor), "backward"
        own = getattr(home, name)
        monkeypatch.setattr(home, name, lambda *args, **kwargs: (told.append(replaced), own(*args, **kwargs)))
    loss = loss_of(net)
    passes.from_loss(loss, retain_graph=retain_graph)
    assert told == [replaced] * bool(replaced)
    assert not passes.by_torch
    if retain_graph:
        passes.from_loss(loss, retain_graph=False)
    theirs = model()
    for _ in range(1 + retain_graph):
        loss_of(theirs).backward()
    for a, b in zip(gradients(theirs), gradients(net), strict=True):
        assert torch.equal(a, b)
