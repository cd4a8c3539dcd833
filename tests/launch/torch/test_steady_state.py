"""A run that has become steady records what it would record otherwise, and stops being steady when a script begins something new."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from benchmarks.speed.host_time import script
from torch import nn
from torch.nn import functional as F

import mezzo
from mezzo.launch.request import GuardRequest
from mezzo.launch.torch import switched
from mezzo.launch.torch.state import TorchRun
from mezzo.launch.torch.steady_state import EVERY_NORM, SteadyState
from mezzo.measure.steps import STEPS_BETWEEN_NORMS
from mezzo.policy import Policy

STEPS, CHANGED_AT = 130, 115
OWN = tuple(str(Path(mezzo.__file__).parent / hall) for hall in ("launch", "measure", "engine/guardrails"))
"""Not the engine: its kernels at autocast's key are called once a process has had a policy that needs them."""
NUM_COUNTED = 32
SCALED = "fp16:op_lists=device"
"""A policy with a loss scale whose runs become steady on a CPU."""


class Training:
    """A script's loop, which may change at one step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 1))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scaler: torch.amp.GradScaler | None = None
        self.steps = 0

    def loss(self) -> torch.Tensor:
        x = torch.randn(8, 4)
        return F.mse_loss(self.model(x).float(), x.sum(1, keepdim=True))

    def step(self) -> None:
        update(self, self.loss())


def plain(training: Training) -> None:
    training.step()


def update(training: Training, *losses: torch.Tensor) -> None:
    """Make an update of losses that the script has computed."""
    training.optimizer.zero_grad()
    for loss in losses:
        (loss if training.scaler is None else training.scaler.scale(loss)).backward()
    step(training)


def accumulates(training: Training) -> None:
    training.optimizer.zero_grad()
    for _ in range(2):
        (training.loss() / 2).backward()
    training.optimizer.step()


def two_updates_a_pass(training: Training) -> None:
    training.step()
    training.optimizer.step()


def closure(training: Training) -> None:
    def evaluate() -> torch.Tensor:
        training.optimizer.zero_grad()
        loss = training.loss()
        loss.backward()
        return loss

    training.optimizer.step(evaluate)


def new_optimizer(training: Training) -> None:
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=1e-3)
    training.step()


def second_optimizer(training: Training) -> None:
    head = torch.optim.SGD([training.model[3].bias], lr=1e-3)
    training.step()
    head.step()


def own_scaler(training: Training) -> None:
    training.scaler = training.scaler or torch.amp.GradScaler("cpu", init_scale=8.0)
    training.step()


def several_roots(training: Training) -> None:
    training.optimizer.zero_grad()
    torch.autograd.backward([training.loss(), training.loss()])
    training.optimizer.step()


def not_finite(training: Training) -> None:
    unscaled(training, training.loss() * float("inf"))


def unscaled(training: Training, loss: torch.Tensor) -> None:
    """Make an update past the script's scaler."""
    training.optimizer.zero_grad()
    loss.backward()
    training.optimizer.step()


def nested(training: Training) -> None:
    inputs = torch.ones(2, 4)
    loss = torch.utils.checkpoint.checkpoint(lambda x: training.model(x).square().mean(), inputs, use_reentrant=True)
    unscaled(training, loss if loss.requires_grad else training.loss())


def session(training: Training) -> None:
    kept = getattr(training, "session", None)
    if kept is None:
        training.session = kept = mezzo.Session(training.model, training.optimizer, policy="fp32")  # type: ignore[attr-defined]
    kept.step(training.loss())


def new_module(training: Training) -> None:
    head = training.__dict__.setdefault("head", nn.Linear(4, 1))
    unscaled(training, training.loss() + head(torch.ones(2, 4)).float().square().mean())


def one_element_loss(training: Training) -> None:
    unscaled(training, training.loss().reshape(1, 1))


def nan_loss(training: Training) -> None:
    unscaled(training, training.loss() * float("nan"))


def scheduler(training: Training) -> None:
    schedule = training.__dict__.get("schedule")
    if schedule is None:
        schedule = training.__dict__["schedule"] = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.9)
    training.step()
    schedule.step()


def failing_backward(training: Training) -> None:
    loss = training.loss()
    loss.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    training.step()


def failing_step(training: Training) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    handle = training.optimizer.register_step_post_hook(fail)
    with pytest.raises(ZeroDivisionError):
        training.step()
    handle.remove()
    training.step()


def model_zero_grad(training: Training) -> None:
    training.model.zero_grad()
    training.loss().backward()
    training.optimizer.step()


def loss_changed_in_place(training: Training) -> None:
    training.optimizer.zero_grad()
    loss = training.loss()
    loss.backward()
    with torch.no_grad():
        loss.mul_(100)
    training.optimizer.step()


def overflows(training: Training) -> None:
    with torch.no_grad():
        training.model[0].weight[0, 0] += 0  # type: ignore[operator, index]
    update(training, training.loss() * float("inf"))


def step(training: Training) -> None:
    if training.scaler is None:
        training.optimizer.step()
    else:
        training.scaler.step(training.optimizer)
        training.scaler.update()


def clips(training: Training) -> None:
    training.optimizer.zero_grad()
    loss = training.loss()
    if training.scaler is None:
        loss.backward()
    else:
        training.scaler.scale(loss).backward()
        training.scaler.unscale_(training.optimizer)
    nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)
    step(training)


def scaler_of(training: Training) -> torch.amp.GradScaler:
    assert training.scaler is not None
    return training.scaler


def unscales_twice(training: Training) -> None:
    clips(training)
    scaler_of(training).scale(training.loss()).backward()
    scaler_of(training).unscale_(training.optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler_of(training).unscale_(training.optimizer)
    step(training)


def steps_twice(training: Training) -> None:
    unstepped(training, scaler_of(training).scale(training.loss()))
    scaler_of(training).step(training.optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler_of(training).step(training.optimizer)
    scaler_of(training).update()


def updates_twice(training: Training) -> None:
    training.step()
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler_of(training).update()


def sets_the_scale(training: Training) -> None:
    training.step()
    scaler_of(training).update(32.0)


def reads_the_scale(training: Training) -> None:
    training.step()
    assert scaler_of(training).get_scale() > 0


def steps_without_the_scaler(training: Training) -> None:
    unscaled(training, training.loss())


def scales_two_losses(training: Training) -> None:
    update(training, training.loss(), training.loss() / 3)


def scales_a_list(training: Training) -> None:
    unstepped(training, sum(scaler_of(training).scale([training.loss(), training.loss()])))
    step(training)


def unstepped(training: Training, loss: Any) -> None:
    training.optimizer.zero_grad()
    loss.backward()


def scales_a_part(training: Training) -> None:
    unstepped(training, scaler_of(training).scale(training.loss()) + 1.0)
    step(training)


def second_scaler(training: Training) -> None:
    training.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    training.step()


def schedule_after_each(training: Training) -> None:
    if training.steps % 3 == 0:
        overflows(training)
    else:
        training.step()
    scheduler(training)


def fused(training: Training) -> None:
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-3, fused=True)
    training.step()


CHANGES = [plain, accumulates, two_updates_a_pass, closure, new_optimizer, second_optimizer, own_scaler, several_roots]
CHANGES += [not_finite, nested, session, new_module, one_element_loss, nan_loss, scheduler, failing_backward]
CHANGES += [failing_step, model_zero_grad, loss_changed_in_place]


OWN_CHANGES = [plain, overflows, clips, unscales_twice, steps_twice, updates_twice, sets_the_scale, reads_the_scale]
OWN_CHANGES += [steps_without_the_scaler, scales_two_losses, scales_a_list, scales_a_part, second_scaler]
OWN_CHANGES += [schedule_after_each, fused, scheduler, new_optimizer, second_optimizer, nested, new_module]
OWN_CHANGES += [
    failing_step,
    accumulates,
    several_roots,
    not_finite,
    loss_changed_in_place,
    failing_backward,
    session,
    nan_loss,
]
"""Changes of a script with a GradScaler of its own."""
QUICK = (plain, overflows, steps_twice, schedule_after_each, fused)


CASES = [
    *((change, None, True) for change in CHANGES),
    *((change, SCALED, False) for change in CHANGES[::3]),  # gradients unscaled in one call have tests of their own
    *(pytest.param(change, "bf16:op_lists=device", False, marks=pytest.mark.slow) for change in CHANGES),
]
OWN_CASES = [
    pytest.param(change, own, once, id=f"{change.__name__} {name}", marks=() if quick else pytest.mark.slow)
    for name, own, once in (("plain AdamW", {}, True), ("fused AdamW", {"fused": True}, False))
    for change in OWN_CHANGES
    for quick in [change in QUICK and (change is plain or not own)]
]


@contextmanager
def never_steady() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SteadyState, "begin", lambda self: None)
        yield


def recorded(
    change: Callable[[Training], None], policy: str | None, *, once: bool, own: dict[str, bool] | None = None
) -> tuple[dict[str, Any], TorchRun, int]:
    """Return the steps without their times, the run, and in how many of them it was steady.

    ``own`` are AdamW's settings in a script with a GradScaler, which changes its scale every 7 updates; None for a script without one.
    """
    with switched(None if policy is None else Policy.of(policy)) as (run, _):
        training, steady = Training(), 0
        if own is not None:
            training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-2, **own)
            training.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=7)
        for number in range(STEPS):
            training.steps = number
            changed = number == CHANGED_AT or (number > CHANGED_AT and not once)
            (change if changed else plain)(training)
            steady += run.steady_state.optimizer() is not None
        run.close_update()
        found = run.update.recorder.steps(run.objects.numbers.names).model_dump(exclude={"time_ms", "cpu_ms"})
    return found, run, steady


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("change", "policy", "once"), CASES)
def test_a_steady_run_records_the_same(change: Callable[[Training], None], policy: str | None, once: bool) -> None:
    found, run, steady = recorded(change, policy, once=once)
    with never_steady():
        expected, other, never = recorded(change, policy, once=once)
    for number, norm in enumerate(found["grad_norm"]):
        if norm != norm and policy == SCALED and not found["skipped"][number]:  # the check of a batched pass needs none
            assert number >= EVERY_NORM
            assert (number + 1) % STEPS_BETWEEN_NORMS
            expected["grad_norm"][number] = norm
    assert repr(found) == repr(expected)  # NaN is equal to itself
    assert len(found["loss"]) >= STEPS
    assert (steady > 10, never) == (True, 0)
    assert run.notes.left_alone == other.notes.left_alone
    assert [f.code for f in run.lint.findings()] == [f.code for f in other.lint.findings()]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad", "ignore:Detected call of `lr_scheduler")
@pytest.mark.parametrize(("change", "own", "once"), OWN_CASES)
def test_a_steady_run_with_a_scaler_of_its_own_records_the_same(
    change: Callable[[Training], None], own: dict[str, bool], once: bool
) -> None:
    found, run, steady = recorded(change, None, once=once, own=own)
    with never_steady():
        expected, other, never = recorded(change, None, once=once, own=own)
    assert repr(found) == repr(expected)  # NaN is equal to itself
    assert len(found["loss"]) >= STEPS - 2
    assert len(set(found["loss_scale"])) > 5
    assert (steady > 10, never) == (True, 0)
    findings = [[f.model_dump(exclude={"message"}) for f in one.lint.findings()] for one in (run, other)]
    assert findings[0] == findings[1]


@pytest.mark.parametrize("policy", ["fp16:arithmetic=emulated", "fp16-master:arithmetic=emulated"])
def test_a_run_with_a_loss_scale_is_never_steady(policy: str) -> None:
    assert recorded(plain, policy, once=True)[2] == 0


OWN_CALLS = [
    # (policy, whether the script has a GradScaler of its own, calls)
    # as-is and fp32 take the loss, the time, and the hooks around the optimizer's step: see StepRecorder.advance
    (None, False, 6.0),
    (None, True, 12.0),
    ("fp32", False, 11.0),
    ("bf16:op_lists=device", False, 11.0),
    # and with a scale the walk through the graph, and the gradients before and after they are unscaled
    ("fp16:op_lists=device", False, 18.0),
]
"""Python calls of the launcher and its recorder a step, at most, sorting into columns and an occasional norm included."""


GUARD_CALLS = 3.5
"""What the guard of ``mezzo run`` adds: every 32nd step inspects the 32 before together."""


@pytest.mark.parametrize("guarded", [False, True], ids=["no guard", "guarded"])
@pytest.mark.parametrize(("policy", "scaler", "most"), OWN_CALLS, ids=str)
def test_calls_a_step_of_a_steady_run(policy: str | None, scaler: bool, most: float, guarded: bool) -> None:
    """Each call costs some 2 us of a step whose arithmetic has emptied the caches; counted, because a time would be noise."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OWN):
            calls[frame.f_code.co_name] += 1

    with switched(None if policy is None else Policy.of(policy)) as (run, _):
        training = Training()
        if scaler:
            training.scaler = torch.amp.GradScaler("cpu")
        if guarded:
            run.begin_guard(GuardRequest(), on_stop=list)
        for _ in range(CHANGED_AT):
            training.step()
        assert run.steady_state.optimizer() is not None
        sys.setprofile(count)
        try:
            for _ in range(NUM_COUNTED):
                training.step()
        finally:
            sys.setprofile(None)
    per_step = sum(calls.values()) / NUM_COUNTED
    assert 5 <= per_step <= most + GUARD_CALLS * guarded, calls


PLAIN, FP16_AMP, BF16_AMP = (None, False), (torch.float16, True), (torch.bfloat16, False)
WHOLE_CALLS = [
    # (policy, the loop by hand and the script: autocast's format and whether a GradScaler scales, Python calls a step that Mezzo may add)
    (None, PLAIN, PLAIN, -3.0),
    (None, FP16_AMP, FP16_AMP, 3.0),
    (None, (torch.bfloat16, True), (torch.bfloat16, True), 5.0),
    ("fp32", PLAIN, PLAIN, 3.0),
    ("bf16:op_lists=device", BF16_AMP, PLAIN, -1.0),
    (
        "bf16:op_lists=device",
        BF16_AMP,
        FP16_AMP,
        16.0,
    ),  # the script's own regions are the policy's, and its scaler is off
    ("fp16:op_lists=device", FP16_AMP, PLAIN, -17.0),
]


@pytest.mark.parametrize(("policy", "by_hand", "ours", "most"), WHOLE_CALLS, ids=str)
def test_calls_a_step_beside_the_loop_by_hand(
    policy: str | None,
    by_hand: tuple[torch.dtype | None, bool],
    ours: tuple[torch.dtype | None, bool],
    most: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All calls, torch's own included, without the guard."""
    monkeypatch.setattr("benchmarks.speed.host_time.SIZES", (4, 8, 8, 2))  # the benchmark's layers, narrower

    def counted(step: Callable[[], None]) -> float:
        calls = 0

        def count(frame: FrameType, event: str, _: Any) -> None:
            nonlocal calls
            calls += event == "call"

        for _ in range(CHANGED_AT):
            step()
        sys.setprofile(count)
        try:
            for _ in range(NUM_COUNTED):
                step()
        finally:
            sys.setprofile(None)
        return calls / NUM_COUNTED

    expected = counted(script(by_hand[0], scales=by_hand[1]))
    with switched(None if policy is None else Policy.of(policy)):
        assert counted(script(ours[0], scales=ours[1])) - expected <= most
