"""Gradients unscaled in one call: against torch's GradScaler, against the hooks, and where a script could see a scaled one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mezzo.launch.torch import switched
from mezzo.launch.torch.steady_state import BatchedUnscaling
from mezzo.policy import Policy

POLICY = "fp16:op_lists=device:growth_interval=9"
STEPS, STEADY_AT, CHANGED_AT = 132, 104, 112


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the batched passes inside."""
    calls: list[int] = []
    original = BatchedUnscaling.unscale

    def unscale(self: BatchedUnscaling, *args: Any) -> None:
        calls.append(1)
        original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchedUnscaling, "unscale", unscale)
        yield calls


@contextmanager
def never_batched() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchedUnscaling, "start_of", lambda *_: None)
        yield


# --- torch's GradScaler --------------------------------------------------------------------------------------------------------

OVERFLOWS = {*range(0, 3), 40, 107, 108, 120}
"""Steps whose loss is so large that its scaled gradients overflow."""


def step_by_step(optimizer_of: Callable[..., torch.optim.Optimizer], *, by_hand: bool, clips: bool) -> Any:
    """Train; return the weights, and the scale and skip of each step, of GradScaler if ``by_hand``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = optimizer_of(model.parameters())
    scaler = torch.amp.GradScaler("cpu", growth_interval=9, enabled=by_hand)
    scales: list[float] = []
    for number in range(STEPS):
        x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16) if by_hand else nullcontext():
            out = model(x)
        loss = F.cross_entropy(out.float(), y) * (1e36 if number in OVERFLOWS else 1.0)
        if not by_hand:
            loss.backward()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale() if by_hand else 0.0)
    return [p.detach().clone() for p in model.parameters()], scales


@pytest.mark.parametrize(
    ("optimizer_of", "clips"),
    [(lambda p: torch.optim.AdamW(p, lr=1e-2), True), (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), False)],
)
def test_a_run_is_the_loop_by_hand_bit_for_bit(optimizer_of: Any, clips: bool) -> None:
    expected, scales = step_by_step(optimizer_of, by_hand=True, clips=clips)
    with counted() as passes, switched(Policy.of(POLICY)) as (run, _):
        found, _ = step_by_step(optimizer_of, by_hand=False, clips=clips)
    steps = run.update.recorder.steps()
    assert scales == steps.loss_scale
    assert steps.skipped == [scale < before for before, scale in pairwise([2.0**16, *scales])]
    assert {number for number, skipped in enumerate(steps.skipped) if skipped} >= OVERFLOWS
    assert all(map(torch.equal, found, expected))
    assert len(passes) > STEPS - STEADY_AT - 12  # not after a skip, nor where the scale grows


# --- the way of hooks ----------------------------------------------------------------------------------------------------------


class Twice(torch.autograd.Function):
    """A node whose backward pass is Python code, which may read gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


class Script:
    """A training loop; a case changes one part of it from step ``CHANGED_AT`` on."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        self.more = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.seen: list[Tensor] = []
        self.x = torch.zeros(8, 4)

    def loss(self) -> Tensor:
        self.x = torch.randn(8, 4)
        return self.model(self.x).float().square().mean()

    @property
    def weight(self) -> nn.Parameter:
        weight: nn.Parameter = self.model[0].weight
        return weight

    def gradient(self) -> Tensor:
        assert self.weight.grad is not None
        return self.weight.grad

    def backward(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()

    def ends(self, *seen: Tensor | None) -> None:
        """Keep what was seen, and update."""
        self.seen += [one.clone() for one in seen if one is not None]
        self.optimizer.step()

    def step(self, loss: Tensor | None = None) -> None:
        self.backward(self.loss() if loss is None else loss)
        self.ends(self.gradient())


def plain(script: Script) -> None:
    script.step()


def clamps(script: Script) -> None:
    script.backward(script.loss() * 1e36)  # overflows
    for parameter in script.model.parameters():
        parameter.grad.clamp_(-1, 1)  # type: ignore[union-attr]
    script.ends()


def changes_data(script: Script) -> None:
    """A change that bumps no version: it makes a gradient infinite."""
    script.backward(script.loss())
    script.gradient().data.div_(0.0)
    script.ends()


def accumulates(script: Script) -> None:
    script.backward(script.loss())
    script.loss().backward()
    script.ends(script.gradient())


def drops_a_pass(script: Script) -> None:
    (script.loss() * 1e36).backward()
    script.step()


def zeroes(script: Script) -> None:
    script.optimizer.zero_grad(set_to_none=False)
    script.loss().backward()
    script.ends(script.gradient())


def leaf_hook(script: Script) -> None:
    handle = script.weight.register_hook(lambda g: script.seen.append(g.clone()))
    script.step()
    handle.remove()


def accumulated_hook(script: Script) -> None:
    def keep(parameter: Tensor) -> None:
        assert parameter.grad is not None
        script.seen.append(parameter.grad.clone())

    handle = script.weight.register_post_accumulate_grad_hook(keep)
    script.step()
    handle.remove()


def reads_in_a_hook(script: Script) -> None:
    """An activation's hook reads the gradient of a parameter behind it."""
    hidden = script.model[0](torch.randn(8, 4)).relu()
    hidden.register_hook(lambda g: script.seen.append(script.model[2].bias.grad.clone()))
    script.backward(script.model[2](hidden).float().square().mean())
    script.ends()


def node_hook(script: Script) -> None:
    loss = script.loss()
    node = script.weight.expand_as(script.weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_prehook(lambda g: script.seen.append(g[0].clone()))
    script.step(loss)


def module_hook(script: Script) -> None:
    handle = script.model[0].register_full_backward_hook(lambda m, i, o: script.seen.append(o[0].clone()))
    script.step()
    handle.remove()


def custom_function(script: Script) -> None:
    script.step(Twice.apply(script.loss()))


def input_gradient(script: Script) -> None:
    x = torch.randn(8, 4, requires_grad=True)
    script.backward(script.model(x).float().square().mean())
    script.ends(x.grad)


def another_module(script: Script) -> None:
    script.backward(script.more(script.model(torch.randn(8, 4))).float().square().mean())
    script.ends(script.more.weight.grad)


def retained(script: Script) -> None:
    hidden = script.model[0](torch.randn(8, 4))
    hidden.retain_grad()
    script.backward(script.model[2](hidden.relu()).float().square().mean())
    script.ends(hidden.grad)


def twice(script: Script) -> None:
    script.optimizer.zero_grad()
    loss = script.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    script.ends(script.gradient())


def given_inputs(script: Script) -> None:
    script.optimizer.zero_grad()
    script.loss().backward(inputs=[script.weight])
    script.ends(script.gradient())


def shared_memory(script: Script) -> None:
    """Autograd leaves views of one tensor as the gradients of several leaves: here of all three, which overlap."""
    one, other, both = (nn.Parameter(torch.randn(size)) for size in (8, 8, 16))
    script.optimizer.param_groups[0]["params"] += [one, other, both]
    script.backward(script.loss() + (torch.cat([one, other]) + both.view(16)).square().sum())
    script.ends(one.grad, other.grad, both.grad)
    del script.optimizer.param_groups[0]["params"][-3:]


def loss_is_a_view(script: Script) -> None:
    """The gradient from which the pass starts becomes, as a view, the gradient of a leaf."""
    bias = nn.Parameter(torch.ones(1))
    script.optimizer.param_groups[0]["params"].append(bias)
    script.backward(script.loss() + bias.view(()))
    script.ends(bias.grad)
    script.optimizer.param_groups[0]["params"].pop()


def reentrant(script: Script) -> None:
    x = torch.randn(8, 4, requires_grad=True)
    script.step(checkpoint(script.model, x, use_reentrant=True).float().square().mean())


def not_reentrant(script: Script) -> None:
    script.step(checkpoint(script.model, torch.randn(8, 4), use_reentrant=False).float().square().mean())


def frozen(script: Script) -> None:
    script.weight.requires_grad_(False)
    script.backward(script.loss())
    script.ends()
    script.weight.requires_grad_(True)


def replaced(script: Script) -> None:
    script.backward(script.loss())
    script.weight.grad = script.gradient().double().float() * 0.5
    script.ends()


def closure(script: Script) -> None:
    def evaluate() -> Tensor:
        script.optimizer.zero_grad()
        loss = script.loss()
        loss.backward()
        return loss

    script.optimizer.step(evaluate)  # type: ignore[arg-type]


def fails(script: Script) -> None:
    """The pass ends with an error after it has computed some gradients, and the script continues with them."""
    script.optimizer.zero_grad()
    loss = script.loss()
    loss.backward(inputs=[script.model[0].bias])  # frees what the pass needs
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    script.ends(*(p.grad for p in script.model.parameters()))


BATCHED = (plain, not_reentrant, frozen, replaced, loss_is_a_view, shared_memory)
"""Cases whose every pass is batched, except after a skip and where the scale grows."""
CASES = [*BATCHED, changes_data, clamps, accumulates, drops_a_pass, zeroes, leaf_hook, accumulated_hook]
CASES += [reads_in_a_hook, node_hook]
CASES += [module_hook, custom_function, input_gradient, another_module, retained, twice, given_inputs, reentrant]
CASES += [closure, fails]


def trained(case: Callable[[Script], None], *, once: bool) -> tuple[dict[str, Any], Script, int]:
    """Return the steps without times and norms, the script, and the number of batched passes after the change."""
    with counted() as passes, switched(Policy.of(POLICY)) as (run, _):
        script = Script()
        before = 0
        for number in range(STEPS):
            if number == CHANGED_AT:
                before = len(passes)
            (case if number == CHANGED_AT or (number > CHANGED_AT and not once) else plain)(script)
        run.close_update()
        found = run.update.recorder.steps().model_dump(exclude={"time_ms", "cpu_ms", "grad_norm"})
    return found, script, len(passes) - before


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize(
    ("case", "once"),
    [*((case, False) for case in CASES), *((case, True) for case in (leaf_hook, accumulates, drops_a_pass, fails))],
)
def test_a_script_computes_and_sees_the_same(case: Callable[[Script], None], once: bool) -> None:
    found, script, passes = trained(case, once=once)
    with never_batched():
        expected, other, never = trained(case, once=once)
    assert repr(found) == repr(expected)
    assert never == 0
    if case in BATCHED:
        assert passes >= 14
    weights = zip(script.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in weights)
    assert len(script.seen) == len(other.seen)
    for one, two in zip(script.seen, other.seen, strict=True):
        assert torch.equal(one.nan_to_num(0, 0, 0), two.nan_to_num(0, 0, 0))  # an overflow is infinite there, NaN here
