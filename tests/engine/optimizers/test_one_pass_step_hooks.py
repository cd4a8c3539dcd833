"""Hooks of optimizers under a session against torch's own loop with GradScaler: which run, when, with what."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import optimizer as torchs

import mezzo
from helpers_engine import Batch, batches, mlp, parameters, same_bits, spoil, train
from mezzo import Session, SessionError
from mezzo.engine.optimizers.one_pass import have_hooks, step_is_own

BUILDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "torch AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "mezzo SGD": lambda p: mezzo.SGD(p, lr=0.1, momentum=0.9),
    "mezzo AdamW": lambda p: mezzo.AdamW(p, lr=1e-2),
}
OVERFLOW = 2  # the number of the batch whose gradients are infinite


@pytest.fixture(autouse=True)
def no_global_hooks() -> Iterator[None]:
    yield
    assert not torchs._global_optimizer_pre_hooks
    assert not torchs._global_optimizer_post_hooks


class Heard:
    """Note the calls of an optimizer's hooks, and the gradients that they see."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, listens: bool = True) -> None:
        self.calls: list[Any] = []
        self.gradients: list[Tensor] = []
        self.optimizer = optimizer
        if listens:
            optimizer.register_step_pre_hook(self.before)
            optimizer.register_step_post_hook(self.after)

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        assert optimizer is self.optimizer
        assert len(args) == 1
        assert args[0] is optimizer
        self.calls.append(("before", kwargs, float(optimizer.param_groups[0]["lr"])))
        self.gradients += [p.grad.clone() for g in optimizer.param_groups for p in g["params"]]

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        assert args[0] is optimizer is self.optimizer
        self.calls.append(("after", kwargs))


def by_hand(name: str, data: list[Batch], scale: float, clip_norm: float | None) -> tuple[nn.Module, Heard]:
    """Train as torch's documentation says, in FP32 with a loss scale."""
    model = mlp(6, 8, 3)
    heard = Heard(BUILDS[name](model.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)
    scheduler = torch.optim.lr_scheduler.StepLR(heard.optimizer, 1, 0.5)
    for number, (x, y) in enumerate(data):
        loss = F.cross_entropy(model(x), y)
        scaler.scale(spoil(loss) if number == OVERFLOW else loss).backward()  # type: ignore[no-untyped-call]
        if clip_norm is not None:
            scaler.unscale_(heard.optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        before = scaler.get_scale()
        scaler.step(heard.optimizer)
        scaler.update()
        if scaler.get_scale() == before:
            scheduler.step()
        heard.optimizer.zero_grad()
    return model, heard


def by_session(
    name: str, data: list[Batch], policy: str, clip_norm: float | None, *, listens: bool = True
) -> tuple[nn.Module, Heard, Session]:
    model = mlp(6, 8, 3)
    heard = Heard(BUILDS[name](model.parameters()), listens=listens)
    scheduler = torch.optim.lr_scheduler.StepLR(heard.optimizer, 1, 0.5)
    session = Session(model, heard.optimizer, policy=policy, clip_norm=clip_norm, scheduler=scheduler)
    train(session, model, data, overflow=OVERFLOW)
    return model, heard, session


@pytest.mark.parametrize("clip_norm", [None, 0.3])
@pytest.mark.parametrize("name", BUILDS)
def test_hooks_run_and_see_the_same_as_in_a_hand_written_loop(name: str, clip_norm: float | None) -> None:
    data = batches(6)
    policy = "fp16:fp32=linear:init_scale=64:growth_interval=1000000"  # products in FP32, and a loss scale
    theirs, wanted = by_hand(name, data, 64.0, clip_norm)
    ours, found, session = by_session(name, data, policy, clip_norm)
    assert session.skipped == 1
    assert found.calls == wanted.calls
    assert [c[0] for c in found.calls] == ["before", "after"] * 5
    for a, b in zip(found.gradients, wanted.gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
    for a, b in zip(parameters(ours), parameters(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16", "fp16-master", "bf16-master", "fp16:loss_scale=static"])
@pytest.mark.parametrize("name", BUILDS)
def test_hooks_run_once_an_update_under_every_policy(name: str, policy: str) -> None:
    scaled = "fp16" in policy
    _, heard, session = by_session(name, batches(6), policy, 1.0)
    updates = 6 - session.skipped
    assert session.skipped == (1 if scaled else 0)
    assert [c[0] for c in heard.calls] == ["before", "after"] * updates
    assert all(g.dtype is torch.float32 for g in heard.gradients)
    if scaled:
        assert all(bool(g.isfinite().all()) and float(g.abs().max()) < 10 for g in heard.gradients)  # without the scale
    rates = [c[2] for c in heard.calls if c[0] == "before"]
    assert rates == pytest.approx([rates[0] * 0.5**k for k in range(updates)])


@pytest.mark.parametrize("name", ["mezzo SGD", "mezzo AdamW"])
@pytest.mark.parametrize("policy", ["fp16", "fp16-master"])
def test_a_listening_session_trains_as_a_deaf_one(name: str, policy: str) -> None:
    listening, _, session = by_session(name, batches(6), policy, 0.3)
    model, heard, deaf = by_session(name, batches(6), policy, 0.3, listens=False)
    assert heard.calls == []
    assert (deaf.skipped, deaf.loss_scale) == (session.skipped, session.loss_scale)
    for a, b in zip(parameters(model), parameters(listening), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-3 if "master" in policy else 1e-6)


@pytest.mark.parametrize("name", BUILDS)
def test_hooks_of_all_optimizers_run_too(name: str) -> None:
    calls: list[str] = []
    before = torchs.register_optimizer_step_pre_hook(lambda *_: calls.append("before"))
    after = torchs.register_optimizer_step_post_hook(lambda *_: calls.append("after"))
    try:
        by_session(name, batches(4), "fp16", None)
    finally:
        before.remove()
        after.remove()
    assert calls == ["before", "after"] * 3


def no_gradient(optimizer: Any, args: Any, kwargs: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.mul_(0.0)


@pytest.mark.parametrize("name", BUILDS)
def test_a_hook_may_change_gradients(name: str) -> None:
    """As gradient centralization, or clipping in a hook, do."""
    results = []
    for halves in (False, True):
        model = mlp(6, 8, 3)
        optimizer = BUILDS[name](model.parameters())
        if halves:
            optimizer.register_step_pre_hook(no_gradient)
        session = Session(model, optimizer, policy="fp16:init_scale=64")
        optimizer.param_groups[0]["weight_decay"] = 0.0
        before = parameters(model)
        train(session, model, batches(2))
        results.append(same_bits(before, parameters(model)))
    assert results == [False, True]


@pytest.mark.parametrize("policy", ["fp32", "fp16"])
def test_hooks_that_come_and_go_are_heard_while_they_are_there(policy: str) -> None:
    model = mlp(6, 8, 3)
    optimizer = mezzo.SGD(model.parameters(), lr=0.1)
    session, calls = Session(model, optimizer, policy=policy), []
    train(session, model, batches(2))
    handle = optimizer.register_step_post_hook(lambda *_: calls.append(len(calls)))
    train(session, model, batches(2))
    handle.remove()
    train(session, model, batches(2))
    assert calls == [0, 1]
    assert session.updates == 6


def test_hooks_registered_after_the_session_are_refused_over_16_bit_gradients() -> None:
    model = mlp(6, 3)
    optimizer = mezzo.SGD(model.parameters(), lr=0.1)
    session = Session(model, optimizer, policy="fp16-master")
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(SessionError) as caught:
        train(session, model, batches(1))
    assert str(caught.value) == (
        "a step hook was registered after the session was built, and its optimizers read 16-bit gradients as they are; "
        "allowed: before\n  hint: register hooks before Session(...): the update then shows them true gradients in FP32"
    )


def test_explain_says_why_gradients_are_shown() -> None:
    def way(policy: str) -> tuple[str, str]:
        model = mlp(6, 3)
        optimizer = mezzo.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: None)
        said = Session(model, optimizer, policy=policy).explain()
        return next((c.value, c.reason) for c in said if c.what == "update")

    reason = "an optimizer has step hooks, which see true gradients, in FP32"
    assert way("bf16-master") == ("optimizers' own step", reason)
    assert way("bf16")[0] == "one pass"


# --- a step that is not the optimizer's own --------------------------------------------------------------------------------


class Counting(mezzo.SGD):
    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        super().step(closure)


def replaced(optimizer: torch.optim.Optimizer) -> None:
    original, optimizer.counted = optimizer.step, 0  # type: ignore[attr-defined]

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer.counted += 1  # type: ignore[attr-defined]
        return original(*args, **kwargs)

    optimizer.step = step  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("policy", ["fp16", "fp16-master"])
def test_a_step_of_a_class_or_patch_of_ones_own_is_called(policy: str, scheduled: bool) -> None:
    for how in ("class", "patch"):
        model = mlp(6, 8, 3)
        optimizer = Counting(model.parameters(), lr=0.1) if how == "class" else mezzo.SGD(model.parameters(), lr=0.1)
        if how == "patch":
            replaced(optimizer)
        elif scheduled:
            torch.optim.lr_scheduler.StepLR(optimizer, 1)
        session = Session(model, optimizer, policy=policy)
        train(session, model, batches(5), overflow=OVERFLOW)
        assert (optimizer.steps if how == "class" else optimizer.counted) == 4  # type: ignore[union-attr, attr-defined]
        assert not step_is_own(optimizer)


def test_which_steps_are_own() -> None:
    for name, build in BUILDS.items():
        optimizer = build(mlp(2, 2).parameters())
        assert step_is_own(optimizer), name
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps the instance's step
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5)
        assert step_is_own(optimizer), name
        assert not have_hooks([optimizer])
        optimizer.register_step_post_hook(lambda *_: None)
        assert have_hooks([optimizer])


# --- hooks of state dicts ------------------------------------------------------------------------------------------------------

PAIRS = [(mezzo.SGD, torch.optim.SGD, {"momentum": 0.9}), (mezzo.AdamW, torch.optim.AdamW, {})]


def trained(build: Any, settings: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    parameter = nn.Parameter(torch.linspace(-1, 1, 300).to(dtype))
    optimizer = build([parameter], lr=0.1, **settings)
    for step in range(3):
        parameter.grad = torch.full_like(parameter, step + 0.5)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(("ours", "theirs", "settings"), PAIRS, ids=["SGD", "AdamW"])
def test_state_hooks_run_as_torchs(ours: Any, theirs: Any, settings: dict[str, Any]) -> None:
    def seen(build: Any) -> Any:
        optimizer, calls = trained(build, settings), []

        def narrowed(o: Any, state: Any) -> Any:
            calls.append(("saved", o is optimizer, sorted(map(str, state["state"][0]))))
            return {**state, "extra": 7}

        optimizer.register_state_dict_pre_hook(lambda o: calls.append(("saving", o is optimizer)))
        optimizer.register_state_dict_post_hook(narrowed)
        optimizer.register_state_dict_post_hook(lambda o, state: calls.append(("again", state["extra"])))
        state = optimizer.state_dict()

        def doubled(o: Any, given: Any) -> Any:
            calls.append(("loading", "extra" in given))
            groups = [{**group, "lr": group["lr"] * 2} for group in given["param_groups"]]
            return {"state": given["state"], "param_groups": groups}

        fresh = build([nn.Parameter(torch.zeros(300))], lr=0.5, **settings)
        fresh.register_load_state_dict_pre_hook(lambda o, given: {k: v for k, v in given.items() if k != "extra"})
        fresh.register_load_state_dict_pre_hook(doubled)
        moments = "exp_avg" if "exp_avg" in state["state"][0] else "momentum_buffer"
        fresh.register_load_state_dict_post_hook(
            lambda o: calls.append(
                ("loaded", o.param_groups[0]["lr"], float(o.state[o.param_groups[0]["params"][0]][moments][0]))
            )
        )
        fresh.load_state_dict(state)
        assert state["extra"] == 7  # what was given stays
        return calls, fresh.param_groups[0]["lr"]

    found, wanted = seen(ours), seen(theirs)
    for one, other in zip(found[0], wanted[0], strict=True):
        if one[0] == "saved":
            assert set(other[2]) <= set(one[2])
        elif one[0] == "loaded":
            assert one[1] == other[1]
            assert one[2] == pytest.approx(other[2])
        else:
            assert one == other
    assert found[1] == wanted[1] == 0.2
    assert [call[0] for call in wanted[0]] == ["saving", "saved", "again", "loading", "loaded"]


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_hooks_see_moments_and_masters_in_fp32(moments: str, dtype: torch.dtype) -> None:
    optimizer, kinds = trained(mezzo.AdamW, {"moments": moments}, dtype), []
    optimizer.register_state_dict_post_hook(
        lambda o, state: kinds.extend(v.dtype for v in state["state"][0].values() if isinstance(v, Tensor))
    )
    optimizer.state_dict()
    assert set(kinds) == {torch.float32}
    assert len(kinds) == (3 if dtype is torch.float32 else 4)


def test_a_pre_hook_may_translate_a_foreign_state() -> None:
    source = trained(torch.optim.AdamW, {})
    state = source.state_dict()
    state["state"]["renamed"] = state["state"].pop(0)
    target = mezzo.AdamW([nn.Parameter(torch.zeros(300))])
    target.register_load_state_dict_pre_hook(
        lambda o, given: {"state": {0: given["state"]["renamed"]}, "param_groups": given["param_groups"]}
    )
    target.load_state_dict(state)
    own = target.state[target.param_groups[0]["params"][0]]
    wanted = source.state[source.param_groups[0]["params"][0]]
    assert torch.equal(own["exp_avg"], wanted["exp_avg"])
    assert float(own["step"]) == 3.0


def test_a_session_saves_and_loads_by_way_of_the_hooks() -> None:
    calls: list[str] = []

    def built() -> Session:
        model = mlp(6, 3)
        optimizer = mezzo.AdamW(model.parameters(), lr=0.1)
        optimizer.register_state_dict_post_hook(lambda o, state: calls.append("saved"))
        optimizer.register_load_state_dict_post_hook(lambda o: calls.append("loaded"))
        return Session(model, optimizer, policy="fp16-master")

    first, second = built(), built()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert calls.count("loaded") == 1
    assert calls.count("saved") >= 1


# --- groups that come later ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fp32", "fp16", "fp16-master", "bf16-master"])
@pytest.mark.parametrize("name", BUILDS)
def test_a_group_that_is_added_later_is_trained_like_the_others(name: str, policy: str) -> None:
    def trained_in(late: bool) -> tuple[nn.Module, Session]:
        model = mlp(6, 8, 3)
        first, second = list(model[0].parameters()), list(model[2].parameters())
        optimizer = BUILDS[name](first if late else [{"params": first}, {"params": second, "lr": 0.05}])
        session = Session(model, optimizer, policy=f"{policy}:init_scale=64" if "fp16" in policy else policy)
        if late:
            optimizer.add_param_group({"params": second, "lr": 0.05})
        train(session, model, batches(4))
        return model, session

    (late, session), (early, _) = trained_in(True), trained_in(False)
    assert session.updates == 4
    for a, b in zip(parameters(late), parameters(early), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3 if policy == "bf16-master" else 5e-4)
    if policy.endswith("-master"):  # small updates are not lost
        assert math.isfinite(session.grad_norm)
        held = [p for g in session.optimizers[0].param_groups for p in g["params"]]
        masters = [session.masters.values(p) for p in late.parameters()]
        assert all(m is not None and m.dtype is torch.float32 for m in masters)
        assert len(held) == 4
