"""Scripts that train with a session, under ``mezzo run``: losses, scales and skips, under its policy or the command's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import mezzo
from helpers_engine import spoil
from mezzo.launch.torch import switched
from mezzo.policy import Policy
from mezzo.records import Steps

BUILDS: dict[str, Any] = {"torch SGD": torch.optim.SGD, "mezzo SGD": mezzo.SGD}
INPUTS = (1, 2, 3, 2, 4)
"""Five micro-batches in windows of four: the last window has one."""


def trained(
    policy: str, command: str | None, build: Any, *, lr: float = 0.0, poison: int | None = None
) -> tuple[Any, Steps]:
    """Train a linear model of weights 0.5: its loss is twice its input, the norm of its gradient as well."""
    with switched(None if command is None else Policy.parse(command)) as (run, _):
        model = nn.Linear(4, 1, bias=False)
        nn.init.constant_(model.weight, 0.5)
        optimizer = build(model.parameters(), lr=lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        session = mezzo.Session(model, optimizer, policy=policy, accumulate=4, scheduler=scheduler)
        for number, value in enumerate(INPUTS):
            with session.autocast():
                loss = model(torch.full((2, 4), float(value))).float().mean()
            session.step(spoil(loss) if number == poison else loss)
        session.update()
    return (session, model, optimizer), run.update.recorder.steps()


@pytest.mark.parametrize("build", BUILDS.values(), ids=list(BUILDS))
@pytest.mark.parametrize("policy", ["fp16:init_scale=256", "fp16-master:init_scale=256", "bf16", "fp32"])
def test_the_record_of_a_session_as_it_is(policy: str, build: Any) -> None:
    (session, _, _), steps = trained(policy, None, build)
    assert steps.loss == [4.0, 8.0]  # means over the micro-batches that a window had, without the loss scale
    assert steps.grad_norm == [4.0, 8.0]
    assert steps.skipped == [False, False]
    assert steps.loss_scale == ([256.0, 256.0] if "fp16" in policy else [])
    assert session.updates == 2


@pytest.mark.parametrize("build", BUILDS.values(), ids=list(BUILDS))
def test_a_skip_of_the_sessions_is_recorded(build: Any) -> None:
    (session, model, optimizer), steps = trained("fp16:init_scale=256", None, build, lr=1.0, poison=1)
    assert (steps.skipped, session.skipped) == ([True, False], 1)
    assert steps.loss == [4.0, 8.0]
    assert steps.loss_scale == [128.0, 128.0]
    assert math.isfinite(steps.grad_norm[1])
    assert model.weight.tolist() == [[0.5 - 4.0] * 4]
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("build", BUILDS.values(), ids=list(BUILDS))
@pytest.mark.parametrize("command", ["fp32", "bf16", "fp16:init_scale=256", "fp16-master:init_scale=256"])
def test_the_commands_policy_takes_a_sessions_place(command: str, build: Any) -> None:
    (session, model, _), steps = trained("fp16-master:init_scale=1024", command, build, lr=1.0)
    assert str(session.policy) == "fp32"
    assert session.loss_scale == 1.0
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert steps.loss_scale == ([256.0, 256.0] if "fp16" in command else [])
    assert steps.loss == [4.0, -24.0]  # after an update of 2, 4 inputs of 4 times -1.5
    assert model.weight.tolist() == [[0.5 - 2.0 - 0.5 * 4.0] * 4]


def test_sessions_are_their_own_again_after_a_run() -> None:
    trained("fp16", "bf16", torch.optim.SGD)
    model = nn.Linear(2, 2)
    assert str(mezzo.Session(model, torch.optim.SGD(model.parameters()), policy="bf16-master").policy) == "bf16-master"
