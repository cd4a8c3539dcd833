"""A session with one-pass optimizers: against the general way, its memory, and that it never waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from helpers_engine import batches, mlp, same_bits
from mezzo.engine.optimizers.one_pass import choose
from mezzo.engine.state import open_window
from mezzo.errors import ScaleFloorError

FP32 = torch.float32
OPTIMIZERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    # Without decay: torch rounds 1 - lr * decay to FP32 and errs by up to 3e-8 of a weight a step, which FP16 forward passes amplify.
    # Ours is compared with float64 (test_kernels, test_optimizers).
    "AdamW": (mezzo.AdamW, torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.0}),
    "SGD": (mezzo.SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01}),
}
both = pytest.mark.parametrize("name", list(OPTIMIZERS))
POLICIES = ["fp16", "fp16-master", "bf16", "bf16-master", "fp32", "fp16-master:loss_scale=static:init_scale=256"]


def build(optimizer: Callable[..., Any], policy: str, settings: dict[str, Any], **options: Any) -> mezzo.Session:
    model = nn.Sequential(*mlp(6, 16, 16, seed=3), nn.LayerNorm(16), nn.Linear(16, 3))
    return mezzo.Session(model, optimizer(model.parameters(), **settings), policy=policy, **options)


def train(session: mezzo.Session, steps: range, *, poison: dict[int, float] | None = None) -> list[dict[str, float]]:
    """Run micro-batches, some of their losses multiplied by what ``poison`` says; return the counts after each."""
    seen = []
    for step, (inputs, targets) in list(enumerate(batches(steps.stop)))[steps.start :]:
        with session.autocast():
            loss = F.cross_entropy(session.models[0](inputs), targets)
        session.step(loss * (poison or {}).get(step, 1.0))
        lr = session.optimizers[0].param_groups[0]["lr"]
        seen.append({"scale": session.loss_scale, "skipped": session.skipped, "updates": session.updates, "lr": lr})
    return seen


def values(session: mezzo.Session) -> list[Tensor]:
    """Return the weights, in FP32 where they have masters, and the buffers."""
    model = session.models[0]
    masters = [(session.masters.values(p), p) for p in model.parameters()]
    held = [parameter if master is None else master for master, parameter in masters]
    return [t.detach().float().clone() for t in (*held, *model.buffers())]


@both
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.05}, {"accumulate": 2, "clip_norm": 0.5}])
def test_ten_steps_are_those_of_torch_s_optimizer(name: str, policy: str, options: dict[str, Any]) -> None:
    ours, theirs, settings = OPTIMIZERS[name]
    sessions = [build(cls, policy, settings, **options) for cls in (ours, theirs)]
    assert [s._one_pass for s in sessions] == [True, False]
    start = values(sessions[0])
    for step in range(10):
        counts = [train(s, range(step, step + 1)) for s in sessions]
        assert counts[0] == counts[1]
        if sessions[0].state.window.calls == 0:
            assert sessions[0].grad_norm == pytest.approx(sessions[1].grad_norm, rel=1e-5)
        for a, b in zip(*map(values, sessions), strict=True):
            # A split master's BF16 weight is rounded otherwise at exact ties, so a forward pass may differ there.
            torch.testing.assert_close(a, b, rtol=0, atol=1e-7)
    assert max(float((a - b).abs().max()) for a, b in zip(values(sessions[0]), start, strict=True)) > 1e-3


POISON = {2: float("inf"), 3: float("nan"), 7: -float("inf")}


@both
@pytest.mark.parametrize("policy", ["fp16", "fp16-master", "fp16-pure:loss_scale=dynamic"])
@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.filterwarnings("ignore::mezzo.PrecisionWarning")
def test_skips_agree_and_change_nothing(name: str, policy: str, scheduled: bool) -> None:
    ours, theirs, settings = OPTIMIZERS[name]
    if name == "AdamW":
        settings = {**settings, "eps": 1e-3}  # torch's moments are FP16 under fp16-pure: a smaller one divides by zero
    counts = []
    for cls in (ours, theirs):
        session = build(cls, f"{policy}:growth_interval=3:init_scale=64", settings, clip_norm=1.0)
        if scheduled:
            session.schedulers.append(torch.optim.lr_scheduler.ExponentialLR(session.optimizers[0], 0.5))
        train(session, range(2), poison=POISON)
        before, lr = everything(session), session.optimizers[0].param_groups[0]["lr"]
        counts.append(train(session, range(2, 4), poison=POISON))
        assert same_bits(everything(session), before)
        assert session.optimizers[0].param_groups[0]["lr"] == lr
        counts[-1] += train(session, range(4, 12), poison=POISON)
        assert not same_bits(everything(session), before)
        assert session.skipped == 3
        assert session.updates == 9
        assert lr == settings["lr"] * (0.25 if scheduled else 1.0)
        assert session.optimizers[0].param_groups[0]["lr"] == settings["lr"] * (0.5**9 if scheduled else 1.0)
    assert counts[0] == counts[1]
    assert [c["scale"] for c in counts[0]] == [32, 16, 16, 16, 32, 16, 16, 16, 32, 32]


def everything(session: mezzo.Session) -> list[Tensor]:
    state = session.optimizers[0].state
    kept = [t.clone() for s in state.values() for t in s.values() if isinstance(t, Tensor)]
    return [*(p.detach().clone() for p in session.models[0].parameters()), *kept]


@both
@pytest.mark.parametrize("policy", ["fp16", "fp16-master"])
def test_the_floor_error_is_raised_once_per_overflow(name: str, policy: str) -> None:
    ours, theirs, settings = OPTIMIZERS[name]
    texts = []
    for cls in (ours, theirs):
        session = build(cls, f"{policy}:init_scale=4:min_scale=2", settings)
        train(session, range(2), poison={1: float("inf")})
        assert session.loss_scale == 2
        with pytest.raises(ScaleFloorError) as error:
            train(session, range(2, 3), poison={2: float("nan")})
        texts.append(str(error.value))
        assert session.skipped == 2
        for optimizer in session.optimizers:
            optimizer.zero_grad()
        open_window(session)  # a caller who continues anyway is not stopped by good updates
        train(session, range(3, 5))
        with pytest.raises(ScaleFloorError):
            train(session, range(5, 6), poison={5: float("nan")})
    assert texts[0] == texts[1]
    assert texts[0].startswith("gradients overflow at the loss scale's floor of 2; not finite: ")


def test_unscale_works_with_fp32_gradients() -> None:
    results = []
    for cls in (mezzo.AdamW, torch.optim.AdamW):
        session = build(cls, "fp16", {"lr": 1e-2, "weight_decay": 0.0})
        with session.autocast():
            loss = session.models[0](torch.ones(2, 6)).square().mean()
        session.backward(loss)
        session.unscale()
        for p in session.models[0].parameters():
            assert p.grad is not None
            p.grad.clamp_(-1e-3, 1e-3)
        session.update()
        results.append(values(session))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


def way(session: mezzo.Session) -> list[tuple[str, str]]:
    return [(c.value, c.reason) for c in session.explain() if c.what == "update"]


def test_the_choice_of_update_is_explained_with_its_reason() -> None:
    general = "optimizers' own step"
    reason = "not all optimizers are Mezzo's own"
    said = build(mezzo.AdamW, "fp16:op_lists=device", {}).explain()
    assert [(c.value, c.reason) for c in said if c.what == "casting"] == [
        ("kernels", "the policy asks for the device's own lists")
    ]
    assert way(build(mezzo.AdamW, "fp16", {})) == [("one pass", choose("cpu")[1])]
    assert way(build(torch.optim.AdamW, "fp16", {})) == [(general, reason)]
    assert way(build(mezzo.SGD, "fp16", {}, clip_value=0.1)) == [(general, "clip_value changes single elements")]
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    mixed = [mezzo.SGD(models[0].parameters()), torch.optim.SGD(models[1].parameters())]
    assert way(mezzo.Session(models, mixed, policy="fp16")) == [(general, reason)]


@both
@pytest.mark.parametrize("policy", ["fp16", "fp16-master", "bf16-master"])
def test_clip_value_uses_the_optimizers_own_step(name: str, policy: str) -> None:
    ours, theirs, settings = OPTIMIZERS[name]
    sessions = [build(cls, policy, settings, clip_value=1e-3) for cls in (ours, theirs)]
    for session in sessions:
        train(session, range(5))
    for a, b in zip(*map(values, sessions), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


# --- memory and waiting ----------------------------------------------------------------------------------------------


BYTES = {
    # weight + gradient + master + moments, in bytes a parameter; a block's exponent adds 1/128 a moment.
    ("fp16-master", "fp32", "nearest"): 2 + 2 + 4 + 8,
    ("fp16-master", "8bit", "nearest"): 2 + 2 + 4 + 2 * (1 + 1 / 128),
    ("bf16-master", "fp32", "nearest"): 2 + 2 + 2 + 8,
    ("bf16-master", "bf16", "nearest"): 2 + 2 + 2 + 4,
    ("bf16-master", "8bit", "nearest"): 2 + 2 + 2 + 2 * (1 + 1 / 128),
    ("bf16-pure", "bf16", "stochastic"): 2 + 2 + 4,
    ("bf16-pure", "8bit", "stochastic"): 2 + 2 + 2 * (1 + 1 / 128),
}


@pytest.mark.parametrize(("policy", "moments", "rounding"), BYTES)
def test_persistent_bytes_a_parameter(policy: str, moments: Any, rounding: Any) -> None:
    model = mlp(256, 256, 256)
    count = sum(p.numel() for p in model.parameters())
    optimizer = mezzo.AdamW(model.parameters(), moments=moments, rounding=rounding)
    session = mezzo.Session(model, optimizer, policy=f"{policy}:arithmetic=emulated", clip_norm=1.0)
    inputs = torch.randn(2, 256)
    for last in (False, True):
        with session.autocast():
            loss = model(inputs).square().mean()
        session.backward(loss)
        if not last:
            session.update()
    kept = [*model.parameters(), *(p.grad for p in model.parameters())]
    kept += [t for s in optimizer.state.values() for t in s.values()]
    holders = (session, session.state.progress, session.state.progress.floor, *session.scales)
    kept += [t for o in holders for t in vars(o).values() if isinstance(t, Tensor)]
    kept += list(getattr(optimizer, "_sources", {}).values())
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept if t is not None}
    assert sum(storages.values()) / count == pytest.approx(BYTES[policy, moments, rounding], abs=1e-3)
    assert all(p.grad is not None and p.grad.element_size() == 2 for p in model.parameters())


class NoWaiting(TorchDispatchMode):
    """Refuse every operation that brings a number to the host, or whose shape depends on one."""

    READS = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique", "_unique2")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        assert func._schema.name.split("::")[1] not in self.READS, f"{func} waits for the device"
        if func is torch.ops.aten._to_copy.default:
            assert result.device == args[0].device, "a copy between devices"
        return result


@pytest.mark.parametrize("call", [lambda t: t.item(), bool, lambda t: t.nonzero(), lambda t: torch.equal(t, t)])
def test_the_watch_sees_waiting(call: Callable[[Tensor], object]) -> None:
    with pytest.raises(AssertionError, match="waits for the device"), NoWaiting():
        call(torch.ones(()))


@both
@pytest.mark.parametrize("policy", ["fp16", "fp16-master", "bf16-master", "fp16:op_lists=device:arithmetic=native"])
def test_a_step_never_waits_for_the_device(name: str, policy: str) -> None:
    ours, _, settings = OPTIMIZERS[name]
    session = build(ours, policy, settings, clip_norm=1.0, accumulate=2)
    train(session, range(2))  # the first loss is read once, to refuse one that is not finite
    with NoWaiting():
        for step, (inputs, targets) in enumerate(batches(6)):
            with session.autocast():
                loss = F.cross_entropy(session.models[0](inputs), targets)
            session.step(loss * (float("inf") if step == 2 else 1.0))
    assert session.updates + session.skipped == 4
    assert session.skipped == (1 if session.scales[0].skips_overflows else 0)


def test_the_general_way_waits_for_one_flag_an_update() -> None:
    session = build(torch.optim.SGD, "fp16", {"lr": 0.1})
    train(session, range(1))
    with pytest.raises(AssertionError, match="waits for the device"), NoWaiting():
        train(session, range(1, 2))
