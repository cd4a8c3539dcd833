"""Losses that depend on gradients: under a loss scale they are those of FP32, to FP16's rounding, also where a first pass overflows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mezzo.launch.torch import switched
from mezzo.launch.torch.backward import loss_name
from mezzo.policy import Policy

X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3
STEEP = 64.0
"""Factor of the inner loss: its gradients are above 1, so they overflow at a scale of 65536."""


def network(width: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, 3))


def called(model: nn.Module, weights: list[Tensor]) -> Tensor:
    named = dict(zip([name for name, _ in model.named_parameters()], weights, strict=True))
    outputs: Tensor = torch.func.functional_call(model, named, (X,))
    return outputs


def looped(optimizer: torch.optim.Optimizer, loss_of: Callable[[], Tensor]) -> Iterator[Tensor]:
    """Yield the outer loss of each of six updates."""
    for _ in range(6):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


def maml(**how: bool) -> Iterator[Tensor]:
    """The inner gradients are those of the parameters that the optimizer trains."""
    model = network()

    def loss() -> Tensor:
        weights = list(model.parameters())
        for _ in range(2):
            gradients = torch.autograd.grad(STEEP * F.cross_entropy(called(model, weights), Y), weights, **how)
            weights = [w - 0.5 / STEEP * g for w, g in zip(weights, gradients, strict=True)]
        return F.cross_entropy(called(model, weights), Y)

    return looped(torch.optim.SGD(model.parameters(), lr=0.1), loss)


def unrolled_hyperparameter() -> Iterator[Tensor]:
    """The loss follows a step whose learning rate is trained."""
    model, rate = network(), torch.tensor(0.1, requires_grad=True)

    def loss() -> Tensor:
        weights = list(model.parameters())
        gradients = torch.autograd.grad(STEEP * F.cross_entropy(model(X), Y), weights, create_graph=True)
        weights = [w - rate / STEEP * g for w, g in zip(weights, gradients, strict=True)]
        return F.cross_entropy(called(model, weights), Y)

    return looped(torch.optim.SGD([rate], lr=0.1), loss)


def learned_optimizer() -> Iterator[Tensor]:
    """The loss follows an update that a trained network has computed from gradients."""
    model, learned = network(), nn.Linear(1, 1)
    nn.init.constant_(learned.weight, -0.1)
    nn.init.zeros_(learned.bias)

    def loss() -> Tensor:
        weights = list(model.parameters())
        gradients = torch.autograd.grad(STEEP * F.cross_entropy(model(X), Y), weights)
        steps = [learned((g / STEEP).reshape(-1, 1)).view_as(g) for g in gradients]
        return F.cross_entropy(called(model, [w + s for w, s in zip(weights, steps, strict=True)]), Y)

    return looped(torch.optim.SGD(learned.parameters(), lr=0.01), loss)


def r1_penalty() -> Iterator[Tensor]:
    """A discriminator's loss has a penalty on its gradient at real data."""
    model = network()

    def loss() -> Tensor:
        real = X.clone().requires_grad_()
        outputs = model(real)
        (slope,) = torch.autograd.grad(STEEP * outputs.sum(), real, create_graph=True)
        return F.softplus(-outputs).mean() + (slope / STEEP).square().sum(1).mean()

    return looped(torch.optim.SGD(model.parameters(), lr=0.01), loss)


WAYS: dict[str, Callable[[], Iterator[Tensor]]] = {
    "MAML of first order": maml,
    "MAML of second order": lambda: maml(create_graph=True),
    "unrolled hyperparameter": unrolled_hyperparameter,
    "learned optimizer": learned_optimizer,
    "R1 penalty": r1_penalty,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_loss_that_depends_on_gradients_is_that_of_fp32(way: Callable[[], Iterator[Tensor]]) -> None:
    expected = [loss.item() for loss in way()]
    with switched(Policy.parse("fp16:arithmetic=emulated:max_scale=65536")) as (run, _):
        found = [loss.item() for loss in way()]
        run.close_update()
    steps = run.update.recorder.steps()
    assert steps.num_skipped == 0
    assert found != expected  # it did run in FP16
    tolerance = 8 * 2.0**-11 * max(map(abs, expected))  # eight roundings of the largest
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= tolerance
    assert [*steps.loss] == pytest.approx(found, rel=1e-6)  # the losses of the inner loop are no losses of the update


def fed_by_hand() -> Iterator[Tensor]:
    """Yield the loss whose gradients the script sets itself, after it has cleared those of another."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        (0.01 * model(X).square().sum()).backward()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True):
            parameter.grad = gradient
        optimizer.step()
        yield loss


def test_gradients_that_the_script_sets_itself_belong_to_the_update() -> None:
    with switched(Policy.parse("fp16:arithmetic=emulated")) as (run, _):
        found = [loss.item() for loss in fed_by_hand()]
        run.close_update()
    assert [*run.update.recorder.steps().loss] == pytest.approx(found, rel=1e-6)


@pytest.mark.parametrize("leaves", ["trained", "inputs"])
def test_a_static_scale_that_overflows_ends(leaves: str) -> None:
    with switched(Policy.parse("fp16:arithmetic=emulated:loss_scale=static:init_scale=16777216")):
        model, x = network(), X.clone().requires_grad_()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(X)
        loss = STEEP * F.cross_entropy(model(x), Y)
        found = torch.autograd.grad(loss, model.parameters() if leaves == "trained" else x)
    assert len(optimizer.param_groups) == 1  # the optimizer lives, so that its parameters are trained ones
    assert any(not math.isfinite(g.sum().item()) for g in found)


# --- A loss has the name that the script gives it in the line of its backward pass, if the line leaves no doubt ---


NAMES = [
    ("loss_d.backward()", False, "loss_d"),
    ("self.loss_g.backward(retain_graph=True)", False, "loss_g"),
    ("losses['actor'].backward()", False, "actor"),
    ("(errD_real + errD_fake).backward()", False, "errD_real + errD_fake"),
    ("(loss_d / 4).backward()", False, "loss_d"),
    ("errG.backward(minus_one)", False, "errG"),
    ("scaler.scale(loss_d).backward()", False, "loss_d"),
    ("scaler.scale(loss_d / steps).backward()", False, "loss_d"),
    ("torch.autograd.backward(g_loss)", False, "g_loss"),
    ("self.manual_backward(d_loss)", True, "d_loss"),
    ("accelerator.backward(d_loss)", True, "d_loss"),
    ("accelerator.backward()", True, ""),
    ("critic(x).mean().backward()", False, ""),
    ("(a + critic(x)).backward()", False, ""),
    ("losses[0].backward()", False, ""),
    ("a.backward(); b.backward()", False, ""),
    ("train()", False, ""),
    ("loss_d.backward(", False, ""),
]


@pytest.mark.parametrize(("text", "by_library", "name"), NAMES, ids=[text for text, *_ in NAMES])
def test_the_name_is_read_from_the_line(text: str, by_library: bool, name: str, tmp_path: Path) -> None:
    script = tmp_path / "a b: c.py"
    script.write_text(f"first.backward()\n{text}\n", encoding="utf-8")
    assert loss_name(f"{script}:2", by_library=by_library) == name


def test_a_call_may_fill_several_lines(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("(\n    loss_d\n    .backward()\n)\n", encoding="utf-8")
    assert [loss_name(f"{script}:{line}", by_library=False) for line in (2, 3, 4)] == ["loss_d", "loss_d", ""]


@pytest.mark.parametrize("line", ["", "<stdin>:1", "/no/such/file.py:3"])
def test_what_cannot_be_read_has_no_name(line: str) -> None:
    assert loss_name(line, by_library=False) == ""
