"""The session against hand-written loops, float64 gradients and counts, and every wrong call against its message."""

from __future__ import annotations

import copy
import cProfile
import math
import pstats
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau, StepLR

import mezzo
from helpers_engine import Batch, Build, batches, mlp, parameters, randn, same_bits, spoil, through_a_file, train
from mezzo import MezzoError, NonFiniteLossError, PolicyError, PrecisionWarning, ScaleFloorError, Session, SessionError
from mezzo.engine.matrix_units.native_units import fp32_products_as_they_were
from mezzo.engine.state import open_window
from mezzo.policy import PRESETS

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
HAND = "fp16:op_lists=device:growth_interval=7"
X = randn(2, 6)


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with fp32_products_as_they_were():
        yield
    torch.set_num_threads(threads)


def small(policy: str = "fp16", *, lr: float = 0.1, **settings: Any) -> tuple[Session, nn.Module]:
    model = mlp(6, 8, 3)
    return Session(model, SGD(model.parameters(), lr=lr, momentum=0.9), policy=policy, **settings), model


def loss_of(session: Session, model: nn.Module, batch: Batch) -> Tensor:
    with session.autocast():
        return F.cross_entropy(model(batch[0]), batch[1])


# --- against a hand-written loop --------------------------------------------------------------------------------------


def by_hand(
    model: nn.Module,
    optimizer: Optimizer,
    data: list[Batch],
    *,
    dtype: torch.dtype = FP16,
    scaler: torch.amp.GradScaler | None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    scheduler: LRScheduler | None = None,
    counts: bool = True,
) -> int:
    """Train as torch's documentation of automatic mixed precision says; return how many updates were skipped, if it counts them."""
    skipped = 0
    for number, (x, y) in enumerate(data, 1):
        with torch.autocast("cpu", dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        loss = loss / accumulate if accumulate > 1 else loss
        (loss if scaler is None else scaler.scale(loss)).backward()
        if number % accumulate:
            continue
        if clip_norm is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        if scaler is None:
            optimizer.step()
        else:
            before = scaler.get_scale() if counts else 0.0
            scaler.step(optimizer)
            scaler.update()
            overflowed = counts and scaler.get_scale() < before
            skipped += overflowed
            if scheduler is not None and not overflowed:
                scheduler.step()
        optimizer.zero_grad()
    return skipped


OPTIMIZERS: dict[str, Build] = {
    "SGD": lambda p: SGD(p, lr=0.1),
    "SGD momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "SGD foreach": lambda p: SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "Adam": lambda p: Adam(p, lr=1e-2),
    "AdamW for-loop": lambda p: AdamW(p, lr=1e-2, foreach=False),
    "AdamW foreach": lambda p: AdamW(p, lr=1e-2, foreach=True),
    "AdamW amsgrad": lambda p: AdamW(p, lr=1e-2, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}
VARIANTS: dict[str, tuple[dict[str, Any], bool, float]] = {
    # settings, with scheduler, initial scale
    "plain": ({}, False, 2.0**16),
    "clipped": ({"clip_norm": 0.3}, False, 2.0**16),
    "accumulated": ({"accumulate": 4}, False, 2.0**16),
    "accumulated, clipped, scheduled": ({"accumulate": 4, "clip_norm": 0.3}, True, 2.0**16),
    "overflowing at first": ({}, True, 2.0**30),
    "overflowing at first, clipped": ({"clip_norm": 0.3}, True, 2.0**30),
    "overflowing at first, accumulated": ({"accumulate": 4}, True, 2.0**30),
}


@pytest.mark.parametrize(
    ("name", "variant"),
    [*((name, "accumulated, clipped, scheduled") for name in OPTIMIZERS), *(("AdamW foreach", v) for v in VARIANTS)],
)
def test_thirty_updates_are_those_of_autocast_and_grad_scaler_to_the_bit(name: str, variant: str) -> None:
    settings, scheduled, scale = VARIANTS[variant]
    data = batches(30 * settings.get("accumulate", 1))
    models, optimizers, schedulers = [], [], []
    for _ in range(2):
        models.append(mlp(6, 8, 3))
        optimizers.append(OPTIMIZERS[name](list(models[-1].parameters())))
        schedulers.append(LambdaLR(optimizers[-1], lambda step: 0.98**step) if scheduled else None)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=7)
    skipped = by_hand(models[0], optimizers[0], data, scaler=scaler, scheduler=schedulers[0], **settings)
    policy = f"{HAND}:init_scale={scale:.0f}:max_scale={2.0**60:.0f}"
    session = Session(models[1], optimizers[1], policy=policy, scheduler=schedulers[1], **settings)
    train(session, models[1], data)
    assert same_bits(parameters(models[0]), parameters(models[1]))
    assert (session.loss_scale, session.skipped) == (scaler.get_scale(), skipped)
    assert session.updates == 30 - skipped
    assert skipped > (5 if scale > 2.0**16 else 0)  # the scale starts too high, or grows until it is
    assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.3}, {"accumulate": 4}], ids=str)
@pytest.mark.parametrize("name", ["SGD momentum", "AdamW foreach"])
def test_bf16_is_autocast_to_the_bit(name: str, settings: dict[str, Any]) -> None:
    data = batches(20)
    theirs, ours = mlp(6, 8, 3), mlp(6, 8, 3)
    by_hand(theirs, OPTIMIZERS[name](list(theirs.parameters())), data, dtype=BF16, scaler=None, **settings)
    session = Session(ours, OPTIMIZERS[name](list(ours.parameters())), policy="bf16:op_lists=device", **settings)
    train(session, ours, data)
    assert same_bits(parameters(theirs), parameters(ours))


def calls_a_step(run: Callable[[list[Batch]], Any]) -> float:
    """Return the Python and built-in function calls a step, which are the same on every machine."""
    run(batches(6))
    profile = cProfile.Profile()
    data = batches(20)
    profile.runcall(run, data)
    return int(pstats.Stats(profile).total_calls) / len(data)  # type: ignore[attr-defined]


@pytest.mark.parametrize("clip_norm", [None, 0.3], ids=["", "clipped"])
@pytest.mark.parametrize("name", ["SGD momentum", "AdamW foreach", "AdamW for-loop"])
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_calls_are_at_most_5_percent_above_a_loop_by_hand(
    dtype: torch.dtype, name: str, clip_norm: float | None
) -> None:
    widths = (6, 8, 8, 3)
    theirs, ours = mlp(*widths), mlp(*widths)
    scaler = torch.amp.GradScaler("cpu") if dtype is FP16 else None
    optimizer = OPTIMIZERS[name](list(theirs.parameters()))
    policy = "fp16:op_lists=device" if dtype is FP16 else "bf16:op_lists=device"
    session = Session(ours, OPTIMIZERS[name](list(ours.parameters())), policy=policy, clip_norm=clip_norm)
    how = {"dtype": dtype, "scaler": scaler, "clip_norm": clip_norm}
    hand = calls_a_step(lambda d: by_hand(theirs, optimizer, d, **how, counts=False))
    mezzos = calls_a_step(lambda d: train(session, ours, d))
    if dtype is BF16 and clip_norm is None:  # a hand-written loop computes no norm of the gradients
        assert mezzos - hand <= 50
    else:
        assert mezzos <= 1.05 * hand


# --- windows of micro-batches ------------------------------------------------------------------------------------------


def double_session(accumulate: int, *, lr: float = 1.0) -> tuple[Session, nn.Module]:
    """Return a session whose update of a parameter is its gradient, in float64."""
    model = mlp(6, 8, 3).double()
    return Session(model, SGD(model.parameters(), lr=lr), policy="fp32", accumulate=accumulate), model


def uneven(sizes: list[int]) -> list[Batch]:
    return [(randn(n, 6, seed=i).double(), torch.arange(n) % 3) for i, n in enumerate(sizes)]


def steps_of(session: Session, model: nn.Module, data: list[Batch], *, weighted: bool) -> list[Tensor]:
    before = parameters(model)
    for x, y in data:
        session.step(F.cross_entropy(model(x), y), weight=len(y) if weighted else None)
    if session.state.window.calls:
        session.update()
    return [a - b for a, b in zip(before, parameters(model), strict=True)]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("sizes", [[4, 4, 4, 4], [1, 9, 1, 1], [6], [3, 8, 1]], ids=str)
def test_weighted_micro_batches_are_the_whole_batch_and_others_averaged(sizes: list[int], weighted: bool) -> None:
    session, model = double_session(4)
    data = uneven(sizes)
    xs, ys = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    mean = torch.stack([F.cross_entropy(model(x), y) for x, y in data]).mean()
    wanted = torch.autograd.grad(F.cross_entropy(model(xs), ys) if weighted else mean, list(model.parameters()))
    got = steps_of(session, model, data, weighted=weighted)
    assert session.updates == 1
    torch.testing.assert_close(got, list(wanted), rtol=1e-12, atol=1e-14)


def test_a_full_window_then_a_short_one() -> None:
    session, model = double_session(4, lr=0.5)
    train(session, model, uneven([4] * 6))
    assert (session.updates, session.state.window.calls) == (1, 2)
    before = parameters(model)
    data = uneven([4] * 6)[4:]
    wanted = torch.autograd.grad(
        torch.stack([F.cross_entropy(model(x), y) for x, y in data]).mean(), list(model.parameters())
    )
    session.update()
    got = [(a - b) / 0.5 for a, b in zip(before, parameters(model), strict=True)]
    torch.testing.assert_close(got, list(wanted), rtol=1e-12, atol=1e-14)
    assert session.updates == 2


@pytest.mark.parametrize("weighted", [False, True])
def test_without_accumulation_a_weight_changes_nothing(weighted: bool) -> None:
    plain, plain_model = double_session(1)
    other, other_model = double_session(1)
    data = uneven([3, 5, 2])
    steps_of(plain, plain_model, data, weighted=False)
    steps_of(other, other_model, data, weighted=weighted)
    torch.testing.assert_close(parameters(plain_model), parameters(other_model), rtol=1e-13, atol=0)


@pytest.mark.parametrize("policy", ["fp16", "fp16:op_lists=device", "bf16", "fp16-master", "bf16-master"])
def test_a_short_window_of_a_scaled_policy(policy: str) -> None:
    """Two equal micro-batches in a window of four give the gradient of one, whatever scale and format."""
    single, one = small(policy, lr=0.5)
    window, two = small(policy, lr=0.5, accumulate=4)
    data = batches(1)
    train(single, one, data)
    train(window, two, data * 2)
    window.update()
    torch.testing.assert_close(parameters(one), parameters(two), rtol=0, atol=2e-3 if "bf16" in policy else 3e-4)
    assert window.grad_norm == pytest.approx(single.grad_norm, rel=1e-2)
    assert window.updates == 1


# --- clipping ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fp32", "fp16", "bf16", "fp16-master", "fp16:op_lists=device"])
@pytest.mark.parametrize("limit", [1e-3, 0.05, 1e3])
def test_clip_norm_bounds_the_update(policy: str, limit: float) -> None:
    session, model = small(policy, lr=1.0, clip_norm=limit)
    before = [p.clone() for p in session.state_dict()["models"][0].values()]
    train(session, model, batches(1))
    after = session.state_dict()["models"][0].values()
    moved = torch.cat([(a - b).flatten() for a, b in zip(before, after, strict=True)]).norm().item()
    assert moved == pytest.approx(min(limit, session.grad_norm), rel=1e-3)
    assert 0.05 < session.grad_norm < 10


@pytest.mark.parametrize("policy", ["fp32", "fp16", "bf16-master"])
def test_clip_value_bounds_every_element(policy: str) -> None:
    session, model = small(policy, lr=1.0, clip_value=1e-3)
    before = [p.clone() for p in session.state_dict()["models"][0].values()]
    train(session, model, batches(1))
    after = session.state_dict()["models"][0].values()
    moved = torch.cat([(a - b).flatten() for a, b in zip(before, after, strict=True)]).abs()
    assert moved.max().item() == pytest.approx(1e-3, rel=1e-3)
    assert (moved > 0.99e-3).float().mean() > 0.5


def test_clip_value_is_torchs() -> None:
    data = batches(10)
    theirs, ours = mlp(6, 8, 3), mlp(6, 8, 3)
    optimizer = SGD(theirs.parameters(), lr=0.1)
    for x, y in data:
        F.cross_entropy(theirs(x), y).backward()
        nn.utils.clip_grad_value_(theirs.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    session = Session(ours, SGD(ours.parameters(), lr=0.1), policy="fp32", clip_value=0.01)
    train(session, ours, data)
    assert same_bits(parameters(theirs), parameters(ours))


def test_grad_norm_is_the_float64_norm_before_clipping() -> None:
    session, model = small("fp16", clip_norm=1e-3)
    assert math.isnan(session.grad_norm)
    loss = loss_of(session, model, batches(1)[0])
    wanted = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    session.step(loss)
    norm = torch.cat([g.double().flatten() for g in wanted]).norm().item()
    assert session.grad_norm == pytest.approx(norm, rel=1e-3)


# --- overflow --------------------------------------------------------------------------------------------------------------


def state_bits(session: Session) -> list[Tensor]:
    state = session.state_dict()
    found = [t for model in state["models"] for t in model.values()]
    for optimizer in state["optimizers"]:
        for entry in optimizer["state"].values():
            found += [torch.as_tensor(v) for v in entry.values() if v is not None]
    return [t.clone() for t in found]


def overflow(session: Session, model: nn.Module, batch: Batch, factor: float = math.inf) -> None:
    session.step(spoil(loss_of(session, model, batch), factor))


OURS: dict[str, Build] = {
    "torch SGD": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "torch AdamW": lambda p: AdamW(p, lr=1e-2, eps=1e-4),  # 1e-8 is 0 in FP16, and refused under fp16-pure
    "mezzo SGD": lambda p: mezzo.SGD(p, lr=0.1, momentum=0.9),
    "mezzo AdamW": lambda p: mezzo.AdamW(p, lr=1e-2),
}


@pytest.mark.parametrize("factor", [math.inf, math.nan])
@pytest.mark.parametrize("policy", ["fp16", "fp16-master", "fp16:op_lists=device", "fp16:loss_scale=static"])
@pytest.mark.parametrize("name", OURS)
def test_a_skipped_update_changes_nothing_but_the_scale_and_the_count(name: str, policy: str, factor: float) -> None:
    model = mlp(6, 8, 3)
    optimizer = OURS[name](list(model.parameters()))
    scheduler = StepLR(optimizer, 1, 0.5)
    session = Session(model, optimizer, policy=policy, scheduler=scheduler, clip_norm=1.0)
    good, bad, *_ = batches(2)
    train(session, model, [good])
    before, scheduled, rate = state_bits(session), scheduler.state_dict(), optimizer.param_groups[0]["lr"]
    weights = parameters(model)
    overflow(session, model, bad, factor)
    assert same_bits(before, state_bits(session))
    assert same_bits(weights, parameters(model))
    assert scheduler.state_dict() == scheduled
    assert optimizer.param_groups[0]["lr"] == rate
    assert (session.updates, session.skipped) == (1, 1)
    assert session.loss_scale == (65536.0 if "static" in policy else 32768.0)
    assert not math.isfinite(session.grad_norm)
    assert all(p.grad is None for p in model.parameters())
    train(session, model, [good])
    assert (session.updates, session.skipped) == (2, 1)
    assert not same_bits(before, state_bits(session))
    assert math.isfinite(session.grad_norm)


def test_one_overflow_in_a_window_skips_the_window() -> None:
    session, model = small("fp16", accumulate=3)
    before = state_bits(session)
    good, bad, last = batches(3)
    train(session, model, [good])
    overflow(session, model, bad)
    train(session, model, [last])
    assert same_bits(before, state_bits(session))
    assert (session.updates, session.skipped, session.loss_scale) == (0, 1, 32768.0)


def cast(session: Session, compute: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return what ``compute`` returns under the session's policy."""
    with session.autocast():
        return compute(*args)


class Line(nn.Module):
    """A model whose gradient is the number that is passed to it."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count))

    def forward(self, slope: float) -> Tensor:
        return (self.weight * slope).sum()


def line(policy: str, **settings: Any) -> tuple[Session, Line]:
    model = Line()
    return Session(model, SGD(model.parameters(), lr=1.0), policy=policy, **settings), model


@pytest.mark.parametrize("build", [SGD, mezzo.SGD])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_gradients_whose_squares_overflow_are_not_skipped(
    build: Callable[..., Optimizer], clip_norm: float | None
) -> None:
    model = Line()
    session = Session(model, build(model.parameters(), lr=0.5), policy="fp16:init_scale=16", clip_norm=clip_norm)
    session.step(cast(session, model, 1e25))  # its square is 1e50; FP32 ends at 3.4e38
    assert (session.updates, session.skipped, session.loss_scale) == (1, 0, 16.0)
    assert session.grad_norm == pytest.approx(math.sqrt(2) * 1e25, rel=1e-5)
    wanted = -0.5 * (1e25 if clip_norm is None else 1 / math.sqrt(2))
    assert model.weight.tolist() == pytest.approx([wanted] * 2, rel=1e-5)


def test_without_a_loss_scale_nothing_is_skipped() -> None:
    session, model = line("bf16")
    session.step(spoil(cast(session, model, 1.0)))
    assert (session.updates, session.skipped, session.loss_scale) == (1, 0, 1.0)
    assert math.isinf(session.grad_norm)
    assert model.weight.isinf().all()


@pytest.mark.parametrize("build", [SGD, mezzo.SGD])
@pytest.mark.parametrize("policy", ["fp16", "fp16-master"])
def test_the_floor_is_an_error_that_names_the_tensor(policy: str, build: Callable[..., Optimizer]) -> None:
    model = mlp(6, 8, 3)
    optimizer = build(model.parameters(), lr=0.1)
    session = Session(model, optimizer, policy=f"{policy}:init_scale=4:min_scale=1")
    (x, y), *_ = batches(1)

    def run() -> None:
        with session.autocast():
            hidden = F.relu(model[0](x.to(model[0].weight.dtype)))
            loss = F.cross_entropy(model[2](spoil(hidden)), y)
        session.step(loss)

    run()
    run()
    assert (session.loss_scale, session.skipped) == (1.0, 2)
    with pytest.raises(ScaleFloorError) as caught:
        run()
    assert caught.value.message.startswith("gradients overflow at the loss scale's floor of 1; not finite: 0.")
    assert "0.weight (" in caught.value.message
    assert "0.bias (" in caught.value.message
    assert "2." not in caught.value.message.split("not finite:")[1].replace("0.", "")
    assert caught.value.hint == (
        "keep the modules of these tensors in FP32 (fp32_modules=...), or use policy bf16, which has FP32's range"
    )


# --- several losses -----------------------------------------------------------------------------------------------------


def two_losses(policy: str, **settings: Any) -> tuple[Session, nn.Module]:
    return small(f"{policy}:growth_interval=3", num_losses=2, **settings)


def losses(session: Session, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    x, y = batch
    with session.autocast():
        out = model(x)
        return F.cross_entropy(out, y), out.float().square().mean()


@pytest.mark.parametrize("policy", ["fp16", "fp16-master", "fp16:op_lists=device"])
@pytest.mark.parametrize("bad", [0, 1])
def test_only_the_scale_of_the_overflowing_loss_backs_off(policy: str, bad: int) -> None:
    session, model = two_losses(policy)
    before = parameters(model)
    for number, loss in enumerate(losses(session, model, batches(1)[0])):
        last = number == 1
        session.backward(spoil(loss) if number == bad else loss, loss_id=number, retain_graph=not last)
    session.update()
    assert [s.value() for s in session.scales] == [32768.0 if i == bad else 65536.0 for i in (0, 1)]
    assert (session.updates, session.skipped) == (0, 1)
    assert same_bits(before, parameters(model))


@pytest.mark.parametrize("name", ["torch SGD", "mezzo SGD"])
@pytest.mark.parametrize("policy", ["fp16", "fp16-master"])
def test_two_losses_add_up_whatever_their_scales_are(policy: str, name: str) -> None:
    model, single = mlp(6, 8, 3), mlp(6, 8, 3)
    session = Session(model, OURS[name](list(model.parameters())), policy=policy, num_losses=2)
    session.scales[1].load_state_dict({"scale": 2.0**10})  # as if it had overflowed six times
    summed = Session(single, OURS[name](list(single.parameters())), policy=policy)
    for batch in batches(5):
        first, second = losses(session, model, batch)
        session.backward(first, loss_id=0, retain_graph=True)
        session.backward(second, loss_id=1)
        session.update()
        summed.step(sum(losses(summed, single, batch)))  # type: ignore[arg-type]
    assert (session.updates, summed.updates) == (5, 5)
    ours = session.state_dict()["models"][0].values()
    torch.testing.assert_close(
        list(ours), list(summed.state_dict()["models"][0].values()), rtol=0, atol=2e-4 if policy == "fp16" else 1e-3
    )
    assert session.grad_norm == pytest.approx(summed.grad_norm, rel=2e-3)


def test_a_scale_grows_by_its_own_losses_only() -> None:
    session, model = two_losses("fp16")
    for _ in range(3):
        session.backward(losses(session, model, batches(1)[0])[0], loss_id=0)
        session.update()
    assert [s.value() for s in session.scales] == [131072.0, 65536.0]
    assert [s.state_dict()["_growth_tracker"] for s in session.scales] == [0, 0]


def test_the_floor_of_one_scale_is_no_error_while_another_overflows() -> None:
    session, model = two_losses("fp16:min_scale=1024")
    session.scales[0].load_state_dict({"scale": 1024.0})
    first, second = losses(session, model, batches(1)[0])
    session.backward(first, loss_id=0, retain_graph=True)
    session.backward(spoil(second), loss_id=1)
    session.update()
    assert (session.skipped, [s.value() for s in session.scales]) == (1, [1024.0, 32768.0])
    with pytest.raises(ScaleFloorError, match="floor of 1024"):
        overflow(session, model, batches(1)[0])


def test_finite_gradients_of_two_losses_whose_squares_overflow_are_not_skipped() -> None:
    session, model = line("fp16:init_scale=16", num_losses=2)
    session.backward(cast(session, model, 1e25), loss_id=0)
    session.backward(cast(session, model, 2e25), loss_id=1)
    session.update()
    assert (session.updates, session.skipped) == (1, 0)
    assert [s.value() for s in session.scales] == [16.0, 16.0]
    assert model.weight.tolist() == pytest.approx([-3e25] * 2, rel=1e-5)


def test_losses_that_overflow_only_together_back_off_both() -> None:
    session, model = line("fp16:init_scale=16", num_losses=2)
    for loss_id in (0, 1):
        session.backward(cast(session, model, 1e37), loss_id=loss_id)  # scaled, 1.6e38 each: their sum is still finite
    session.update()
    assert (session.updates, session.skipped) == (1, 0)
    for loss_id in (0, 1):
        session.backward(cast(session, model, 2e37), loss_id=loss_id)  # 3.2e38 each, the sum beyond FP32
    session.update()
    assert (session.updates, session.skipped) == (1, 1)
    assert [s.value() for s in session.scales] == [8.0, 8.0]


def test_two_losses_in_windows_of_two() -> None:
    session, model = double_session(2)
    session.scales.extend(session.scales[:])
    open_window(session)
    data = uneven([3, 5])
    terms = [(F.cross_entropy(model(x), y), model(x).square().mean(), len(y)) for x, y in data]
    total = sum((a + b) * n for a, b, n in terms) / 8
    wanted = torch.autograd.grad(total, list(model.parameters()), retain_graph=True)  # type: ignore[arg-type]
    before = parameters(model)
    for first, second, n in terms:
        session.backward(first, loss_id=0, weight=n, retain_graph=True)
        session.backward(second, loss_id=1, weight=n)
    session.update()
    got = [a - b for a, b in zip(before, parameters(model), strict=True)]
    torch.testing.assert_close(got, list(wanted), rtol=1e-12, atol=1e-14)


# --- several optimizers ---------------------------------------------------------------------------------------------------


class Pair:
    """A generator and a discriminator of a GAN, two optimizers, two losses."""

    def __init__(self, policy: str = "fp16", build: Build = OURS["torch SGD"], **settings: Any) -> None:
        self.g, self.d = mlp(4, 6, 5), mlp(5, 6, 1, seed=1)
        self.opt_g, self.opt_d = build(list(self.g.parameters())), build(list(self.d.parameters()))
        self.session = Session([self.g, self.d], [self.opt_g, self.opt_d], policy=policy, num_losses=2, **settings)
        self.noise, self.real = randn(8, 4), randn(8, 5, seed=1)

    def d_loss(self) -> Tensor:
        with self.session.autocast():
            with torch.no_grad():
                fake = self.g(self.noise)
            out = torch.cat([self.d(self.real), self.d(fake)]).float()
            return F.binary_cross_entropy_with_logits(out, torch.cat([torch.ones(8, 1), torch.zeros(8, 1)]))

    def g_loss(self) -> Tensor:
        with self.session.autocast():
            out = self.d(self.g(self.noise)).float()
            return F.binary_cross_entropy_with_logits(out, torch.ones(8, 1))


@pytest.mark.parametrize("policy", ["fp32", "fp16", "fp16-master", "bf16", "bf16-master"])
@pytest.mark.parametrize("name", ["torch SGD", "mezzo AdamW"])
def test_a_gan_updates_one_network_at_a_time(policy: str, name: str) -> None:
    pair = Pair(policy, OURS[name])
    for _ in range(3):
        g, d = parameters(pair.g), parameters(pair.d)
        pair.session.backward(pair.d_loss(), loss_id=0)
        pair.session.update(pair.opt_d)
        assert same_bits(g, parameters(pair.g))
        assert not same_bits(d, parameters(pair.d))
        d = parameters(pair.d)
        pair.session.backward(pair.g_loss(), loss_id=1)
        pair.session.update(pair.opt_g)
        assert same_bits(d, parameters(pair.d))
        assert not same_bits(g, parameters(pair.g))
        assert all(p.grad is None for p in [*pair.g.parameters(), *pair.d.parameters()])
    assert (pair.session.updates, pair.session.skipped) == (6, 0)


def test_a_gan_matches_a_hand_written_loop_to_the_bit() -> None:
    pair, hand = Pair("fp16:op_lists=device"), Pair("fp32")
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(10):
        pair.session.backward(pair.d_loss(), loss_id=0)
        pair.session.update(pair.opt_d)
        pair.session.backward(pair.g_loss(), loss_id=1)
        pair.session.update(pair.opt_g)
        for loss, optimizer in ((hand.d_loss, hand.opt_d), (hand.g_loss, hand.opt_g)):
            with torch.autocast("cpu", dtype=FP16):
                value = loss()
            scaler.scale(value).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            hand.opt_g.zero_grad()
            hand.opt_d.zero_grad()
    assert same_bits(parameters(pair.g), parameters(hand.g))
    assert same_bits(parameters(pair.d), parameters(hand.d))


def test_two_optimizers_in_one_update_are_one_optimizer_of_two_groups() -> None:
    first, second = mlp(6, 8, 3), mlp(6, 8, 3)
    together = SGD([{"params": first[0].parameters()}, {"params": first[2].parameters(), "lr": 0.3}], lr=0.1)
    apart = [SGD(second[0].parameters(), lr=0.1), SGD(second[2].parameters(), lr=0.3)]
    train(Session(first, together, policy="fp16", clip_norm=0.2), first, batches(10))
    train(Session(second, apart, policy="fp16", clip_norm=0.2), second, batches(10))
    assert same_bits(parameters(first), parameters(second))


def test_schedulers_follow_their_optimizers() -> None:
    pair = Pair()
    schedulers = [StepLR(pair.opt_g, 1, 0.5), StepLR(pair.opt_d, 1, 0.5)]
    session = Session([pair.g, pair.d], [pair.opt_g, pair.opt_d], num_losses=2, scheduler=schedulers)
    pair.session = session
    session.backward(pair.d_loss(), loss_id=0)
    session.update(pair.opt_d)
    assert [o.param_groups[0]["lr"] for o in (pair.opt_g, pair.opt_d)] == [0.1, 0.05]
    session.backward(pair.g_loss(), loss_id=1)
    session.update()
    assert [o.param_groups[0]["lr"] for o in (pair.opt_g, pair.opt_d)] == [0.05, 0.025]


def test_the_norm_is_over_the_optimizers_updated() -> None:
    pair = Pair("fp32")
    wanted = torch.autograd.grad(pair.g_loss(), list(pair.g.parameters()))
    norm = torch.cat([g.flatten() for g in wanted]).norm().item()
    for unscale in (False, True):
        pair = Pair("fp32")
        pair.session.backward(pair.g_loss(), loss_id=1)
        if unscale:
            pair.session.unscale()
        pair.session.update(pair.opt_g)
        assert pair.session.grad_norm == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("num_losses", [1, 2])
def test_a_parameter_in_two_models_is_counted_once(num_losses: int) -> None:
    shared = nn.Linear(6, 3)
    first, second = nn.Sequential(shared), nn.Sequential(shared, nn.Identity())
    session = Session([first, second], SGD(shared.parameters(), lr=1.0), policy="fp16", num_losses=num_losses)
    (x, y), *_ = batches(1)
    before = parameters(shared)
    with session.autocast():
        loss, other = F.cross_entropy(first(x), y), second(x).float().square().mean()
    wanted = torch.autograd.grad(loss + other, list(shared.parameters()), retain_graph=True)
    session.backward(loss, retain_graph=True)
    session.backward(other, loss_id=num_losses - 1)
    session.update()
    got = [a - b for a, b in zip(before, parameters(shared), strict=True)]
    torch.testing.assert_close(got, list(wanted), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("num_losses", [1, 2])
def test_a_parameter_outside_the_models_is_trained_too(num_losses: int) -> None:
    model, extra = Line(), nn.Parameter(torch.zeros(2))
    optimizer = SGD([*model.parameters(), extra], lr=1.0)
    session = Session(model, optimizer, policy="fp16", num_losses=num_losses)
    session.scales[-1].load_state_dict({"scale": 256.0})
    for loss_id in range(num_losses):
        session.backward(cast(session, model, 1.0) + (extra * 3.0).sum(), loss_id=loss_id)
    session.update()
    assert model.weight.tolist() == [-1.0 * num_losses] * 2
    assert extra.tolist() == [-3.0 * num_losses] * 2


# --- looking at gradients in between ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.1}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize("policy", ["fp32", "fp16", "bf16", "fp16-master", "fp16:op_lists=device"])
def test_unscaling_to_inspect_gradients_changes_nothing(policy: str, settings: dict[str, Any]) -> None:
    first, plain = small(policy, **settings)
    second, looked = small(policy, **settings)
    accumulate = settings.get("accumulate", 1)
    for number, (x, y) in enumerate(batches(10), 1):
        for session, model in ((first, plain), (second, looked)):
            session.backward(loss_of(session, model, (x, y)))
            if number % accumulate == 0:
                if session is second:
                    session.unscale()
                session.update()
    assert same_bits(parameters(plain), parameters(looked))
    assert first.grad_norm == second.grad_norm
    assert first.loss_scale == second.loss_scale


def test_unscaled_gradients_are_the_true_ones_and_may_be_changed() -> None:
    session, model = small("fp16", lr=1.0, accumulate=4)
    loss = loss_of(session, model, batches(1)[0])
    wanted = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    session.backward(loss)
    session.unscale()
    got = [p.grad for p in model.parameters()]
    torch.testing.assert_close(got, list(wanted), rtol=2e-3, atol=1e-5)
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.25)
    before = parameters(model)
    session.update()
    assert all(torch.equal(a - 0.25, b) for a, b in zip(before, parameters(model), strict=True))
    assert session.grad_norm == pytest.approx(0.25 * math.sqrt(sum(p.numel() for p in model.parameters())), rel=1e-6)


def test_clipping_after_unscale_is_by_the_changed_gradients() -> None:
    session, model = line("fp16", clip_norm=1.0)
    session.backward(cast(session, model, 0.1))
    session.unscale()
    assert model.weight.grad is not None
    model.weight.grad.fill_(30.0)
    session.update()
    assert model.weight.tolist() == pytest.approx([-1 / math.sqrt(2)] * 2, rel=1e-5)


# --- saving and loading -------------------------------------------------------------------------------------------------------

EVERY_POLICY = [
    *PRESETS,
    "fp16:op_lists=device",
    "fp16:init_scale=1e12:max_scale=1e13:growth_interval=2:hysteresis=2:backoff_factor=0.25:growth_factor=4",
    "fp16:loss_scale=static:init_scale=128",
    "fp16-master:norms=compute:init_scale=1e10:max_scale=1e13",
    "fp16-master:fp32_modules=0",
]


class Normed(nn.Module):
    """Linear layers, a batch norm with statistics and a layer norm."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]


def resumable(policy: str, name: str, seed: int) -> tuple[Session, nn.Module]:
    model = Normed(seed)
    optimizer = OURS[name](list(model.parameters()))
    policy = policy.replace("fp32_modules=0", "fp32_modules=body.0")
    scheduler = StepLR(optimizer, 2, 0.9)
    return Session(model, optimizer, policy=policy, scheduler=scheduler, clip_norm=1.0), model


@pytest.mark.filterwarnings("ignore::mezzo.PrecisionWarning")
@pytest.mark.parametrize(
    ("policy", "name"),
    [*((p, "mezzo AdamW") for p in EVERY_POLICY), *((p, n) for p in EVERY_POLICY[-2:] for n in OURS)],
)
def test_training_resumes_from_a_file_to_the_bit(policy: str, name: str) -> None:
    session, model = resumable(policy, name, seed=0)
    data = batches(12)
    train(session, model, data[:7])
    saved = through_a_file(session.state_dict())
    train(session, model, data[7:])
    other, copied = resumable(policy, name, seed=1)
    other.load_state_dict(saved)
    train(other, copied, data[7:])
    assert same_bits(state_bits(session), state_bits(other))
    assert same_bits(parameters(model), parameters(copied))
    a, b = session.state_dict(), other.state_dict()
    assert a["scales"] == b["scales"]
    assert a["schedulers"] == b["schedulers"]
    assert (session.updates, session.skipped) == (other.updates, other.skipped)
    assert session.updates + session.skipped == 12
    if "1e12" in policy:
        assert session.skipped > 2
        assert a["scales"][0]["growth_factor"] == 4.0


def test_a_saved_state_is_fp32_and_plain() -> None:
    session, model = resumable("fp16-master", "torch AdamW", seed=0)
    train(session, model, batches(3))
    state = session.state_dict()
    assert all(t.dtype in (FP32, torch.int64) for t in state["models"][0].values())
    assert state["policy"] == "fp16-master"
    fresh = Normed(5)
    fresh.load_state_dict(state["models"][0])
    assert same_bits(list(fresh.parameters()), [state["models"][0][n] for n, _ in fresh.named_parameters()])


@pytest.mark.filterwarnings("ignore::mezzo.PrecisionWarning")
@pytest.mark.parametrize("name", ["torch AdamW", "mezzo AdamW"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        *(("fp16", after) for after in EVERY_POLICY),
        *((before, "fp16-master") for before in ("fp32", "bf16-master", "fp16-master", "fp16:loss_scale=static")),
    ],
)
def test_a_state_loads_under_another_policy(before: str, after: str, name: str) -> None:
    session, model = resumable(before, name, seed=0)
    train(session, model, batches(4))
    other, copied = resumable(after, name, seed=1)
    state = copy.deepcopy(session.state_dict())
    other.load_state_dict(state)
    mine = other.state_dict()["models"][0]
    for key, value in state["models"][0].items():
        assert torch.equal(mine[key], value.to(mine[key].dtype))
    if other.policy.master_weights:
        assert all(mine[key].dtype is FP32 for key, _ in copied.named_parameters())
    assert (other.updates, other.skipped) == (session.updates, session.skipped)
    if other.scales[0].skips_overflows and session.scales[0].skips_overflows:
        assert other.loss_scale == session.loss_scale
    train(other, copied, batches(2))
    assert other.updates + other.skipped == 6
    if other.skipped == session.skipped and (after, name) != ("fp16-pure", "torch AdamW"):  # whose eps is zero in FP16
        assert math.isfinite(other.grad_norm)
        assert all(t.isfinite().all() for t in state_bits(other))


def test_a_state_with_another_shape_is_refused() -> None:
    session, _ = small()
    state = session.state_dict()
    other, _ = small(num_losses=2)
    with pytest.raises(SessionError) as caught:
        other.load_state_dict(state)
    assert caught.value.message == "the state has 1 scales, this session 2"
    assert caught.value.hint == "build the session as it was when it saved the state"


# --- weights ---------------------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore::mezzo.PrecisionWarning")
@pytest.mark.parametrize("name", ["torch AdamW", "mezzo SGD"])
@pytest.mark.parametrize("policy", PRESETS)
def test_tied_weights_stay_tied_and_follow_fp32(policy: str, name: str) -> None:
    tokens, targets = torch.tensor([0, 3, 5]), torch.tensor([1, 1, 6])
    if (policy, name) == ("fp16-pure", "torch AdamW"):
        pytest.skip("its eps is zero in FP16: every weight becomes NaN")
    results = []
    for text in ("fp32", f"{policy}:init_scale=256" if "fp16" in policy else policy):
        model = Tied()
        session = Session(model, OURS[name](list(model.parameters())), policy=text)
        for _ in range(3):
            with session.autocast():
                loss = F.cross_entropy(model(tokens), targets)
            session.step(loss)
        assert model.head.weight is model.embed.weight
        state = session.state_dict()["models"][0]
        assert torch.equal(state["head.weight"], state["embed.weight"])
        assert session.updates == 3
        results.append(state["head.weight"].float())
    start = Tied().head.weight.detach()
    moved = (results[0] - start).norm()
    assert (results[1] - results[0]).norm() < 0.25 * moved


@pytest.mark.filterwarnings("ignore::mezzo.PrecisionWarning")
@pytest.mark.parametrize("name", ["torch SGD", "mezzo AdamW"])
@pytest.mark.parametrize("policy", PRESETS)
def test_frozen_parameters_stay(policy: str, name: str) -> None:
    model = mlp(6, 8, 3)
    model[0].weight.requires_grad_(False)
    session = Session(model, OURS[name](list(model.parameters())), policy=policy)
    before = session.state_dict()["models"][0]
    frozen, free = before["0.weight"].clone(), before["2.weight"].clone()
    train(session, model, batches(3))
    after = session.state_dict()["models"][0]
    assert torch.equal(after["0.weight"], frozen)
    assert not torch.equal(after["2.weight"], free)
    assert not model[0].weight.requires_grad


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("policy", ["fp16-master", "bf16-master"])
def test_the_models_weights_are_their_masters_rounded(policy: str, name: str) -> None:
    model = mlp(6, 8, 3)
    session = Session(model, OURS[name](list(model.parameters())), policy=policy)
    for batch in [None, *batches(5)]:
        if batch is not None:
            train(session, model, [batch])
        masters = session.state_dict()["models"][0]
        for key, parameter in model.named_parameters():
            assert masters[key].dtype is FP32
            assert torch.equal(parameter, masters[key].to(parameter.dtype))
            assert not torch.equal(parameter.float(), masters[key])


def test_bf16_pure_warns_when_updates_are_lost() -> None:
    model = nn.Linear(16, 16, bias=False)
    nn.init.ones_(model.weight)
    session = Session(model, AdamW(model.parameters(), lr=1e-4, weight_decay=0.0), policy="bf16-pure")
    x = randn(4, 16)

    def run() -> None:
        session.step(model(x).square().mean())

    with pytest.warns(PrecisionWarning) as caught:
        run()
    assert str(caught[0].message) == (
        "100% of 256 weights did not change in the first update under policy bf16-pure: "
        "updates below half a unit in the last place are lost; use bf16-master"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()  # said once
    assert torch.equal(model.weight, torch.ones(16, 16, dtype=BF16))


def test_large_updates_of_pure_weights_do_not_warn() -> None:
    session, model = small("bf16-pure", lr=0.5)
    train(session, model, batches(2))
    assert session.updates == 2


def test_gradients_of_16_bit_weights_reach_the_masters_in_full() -> None:
    """An FP16 gradient of 2**-20 times the scale is far above FP16's floor; unscaled in FP16 it would round to steps of 2**-24."""
    session, model = line("fp16-master")
    slope = 2.0**-30
    session.step(model(1.0) * slope)
    assert session.state_dict()["models"][0]["weight"].tolist() == [-slope] * 2
    assert session.grad_norm == pytest.approx(slope * math.sqrt(2), rel=1e-6)


# --- what is refused ----------------------------------------------------------------------------------------------------------------


def no_calls(wanted: Callable[[Session, nn.Module], Any]) -> Callable[[], Any]:
    def run() -> Any:
        session, model = small()
        return wanted(session, model)

    return run


def after_backward(wanted: Callable[[Session, Tensor], Any], **settings: Any) -> Callable[[], Any]:
    def run() -> Any:
        session, model = small(**settings)
        loss = loss_of(session, model, batches(1)[0])
        session.backward(loss, retain_graph=True)
        return wanted(session, loss)

    return run


def build(**settings: Any) -> Callable[[], Any]:
    return lambda: small(**settings)


def twice(session: Session, _: Tensor) -> None:
    session.unscale()
    session.unscale()


def backward_after_unscale(session: Session, loss: Tensor) -> None:
    session.unscale()
    session.backward(loss)


def update_twice(session: Session, _: Tensor) -> None:
    session.update()
    session.update()


def shared_parameter() -> Session:
    model = mlp(6, 3)
    return Session(model, [SGD(model.parameters(), lr=0.1), SGD([model[0].bias], lr=0.1)])


def lbfgs() -> Session:
    model = mlp(6, 3)
    return Session(model, torch.optim.LBFGS(model.parameters()))


def plateau() -> Session:
    model = mlp(6, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    return Session(model, optimizer, scheduler=ReduceLROnPlateau(optimizer))


def foreign(session: Session, _: Tensor) -> None:
    session.update(AdamW([nn.Parameter(torch.zeros(1))]))


def different_weights(session: Session, loss: Tensor) -> None:
    session.backward(loss, loss_id=1, weight=3.0, retain_graph=True)
    session.backward(loss, loss_id=1, weight=1.0)
    session.update()


def unscale_half() -> None:
    model = mlp(6, 3)
    session = Session(model, mezzo.SGD(model.parameters()), policy="fp16-master")
    session.backward(model(X).mean())
    session.unscale()


def infinite(session: Session, model: nn.Module) -> None:
    session.step(model(X * math.inf).mean())


WHOLE, ABOVE = "allowed: a whole number of 1 or more", "allowed: a number above 0, or None"
CLIP_HINT = "leave clip_{} out to train without clipping"
LBFGS = "LBFGS evaluates the loss several times per update through a closure; a session has one backward pass"
NO_BACKWARD = "{}() without a backward pass since the last update"
UPDATE_HINT = (
    "call step(loss) or backward(loss) first; to update several optimizers from one backward pass "
    "call update() or update(first, second) once"
)
LOSS = "backward() got {}; a loss is one number that depends on the model"
LOSS_HINT = "pass the mean loss of the micro-batch, computed from the model's output"
GRAPH_HINT = "compute it from the model's output, outside torch.no_grad(), with parameters that require gradients"
FINITE_HINT = "no loss scale can help: check the data and the forward pass, and compare with policy fp32"
WEIGHT_HINT = "pass the number of samples or tokens that the loss is the mean of"
ID_HINT = "build the session with num_losses as large as the number of losses"
NAMES_HINT = "patterns match whole names as model.named_modules() gives them, with * and ?"
WRONG: list[tuple[Callable[[], Any], str, str]] = [
    *((build(accumulate=n), f"accumulate={n}; {WHOLE}", "leave accumulate out for the default, 1") for n in (0, 1.5, True)),
    *((build(clip_norm=x), f"clip_norm={x}; {ABOVE}", CLIP_HINT.format("norm")) for x in (True, 0, math.nan)),
    (build(clip_value=-1.0), f"clip_value=-1.0; {ABOVE}", CLIP_HINT.format("value")),
    (build(num_losses=0), f"num_losses=0; {WHOLE}", "leave num_losses out for the default, 1"),
    (build(policy="fp16:fp32_modules=head"), "no module is named 'head'; allowed: 0, 1, 2", NAMES_HINT),
    (
        shared_parameter,
        "optimizers 0 and 1 share a parameter of shape (3,)",
        "give every parameter to one optimizer: it would be updated twice",
    ),
    (
        lambda: Session(nn.ReLU(), SGD([nn.Parameter(torch.zeros(1))], lr=0.1)),
        "the model has no parameters; allowed: a module, or several, with at least one",
        "pass the module whose parameters the optimizer has",
    ),
    (lbfgs, LBFGS, "train with LBFGS in FP32, or run the script under mezzo run, which handles closures"),
    (
        plateau,
        "ReduceLROnPlateau steps on a metric that the session does not know",
        "leave it out of the session and call scheduler.step(metric) yourself",
    ),
    (no_calls(lambda s, m: s.unscale()), NO_BACKWARD.format("unscale"), "call step(loss) or backward(loss) first"),
    (
        after_backward(twice),
        "unscale() was already called since the last update",
        "call it once per window; unscaling twice would divide the gradients twice",
    ),
    (
        unscale_half,
        "unscale() with gradients in 16 bits, which one-pass optimizers read as they are",
        "use clip_norm, or torch's optimizer, whose masters get FP32 gradients",
    ),
    (
        after_backward(backward_after_unscale),
        "backward() after unscale(): scaled gradients would be added to unscaled ones",
        "call update() first",
    ),
    (no_calls(lambda s, m: s.update()), NO_BACKWARD.format("update"), UPDATE_HINT),
    (after_backward(update_twice), NO_BACKWARD.format("update"), UPDATE_HINT),
    (
        after_backward(foreign),
        "update() got AdamW, which is not one of this session's 1 optimizers",
        "pass optimizers that the session was built with, or none to update all",
    ),
    (
        after_backward(lambda s, loss: s.state_dict(), accumulate=4),
        "state_dict() after 1 backward passes of an open window",
        "call update() first: gradients of an open window are not saved",
    ),
    (no_calls(lambda s, m: s.step(m(X))), LOSS.format("a tensor of shape (2, 3) with requires_grad=True"), LOSS_HINT),
    (
        no_calls(lambda s, m: s.step(m(X).mean().detach())),
        LOSS.format("a tensor of shape () with requires_grad=False"),
        GRAPH_HINT,
    ),
    (no_calls(lambda s, m: s.step(1.5)), LOSS.format("1.5"), LOSS_HINT),  # type: ignore[arg-type]
    (no_calls(infinite), "the loss is nan before the first update", FINITE_HINT),
    (no_calls(lambda s, m: s.step(m(X).mean() + math.inf)), "the loss is inf before the first update", FINITE_HINT),
    (after_backward(lambda s, loss: s.backward(loss, weight=0)), "weight=0; allowed: a number above 0", WEIGHT_HINT),
    (after_backward(lambda s, loss: s.backward(loss, weight=math.nan)), "weight=nan; allowed: a number above 0", WEIGHT_HINT),
    (after_backward(lambda s, loss: s.backward(loss, loss_id=1)), "loss_id=1; allowed: 0 to 0", ID_HINT),
    (after_backward(lambda s, loss: s.backward(loss, loss_id=-1), num_losses=3), "loss_id=-1; allowed: 0 to 2", ID_HINT),
    (
        after_backward(different_weights, accumulate=2, num_losses=2),
        "the losses of this window have different total weights (loss 0: 0.5, loss 1: 2 of a full window)",
        "give every loss of a micro-batch that micro-batch's weight",
    ),
]  # fmt: skip
KINDS = {"the loss is": NonFiniteLossError, "no module is": PolicyError}
"""What is raised where it is no SessionError, by the message's beginning."""


@pytest.mark.parametrize(("run", "message", "hint"), WRONG, ids=[message for _, message, _ in WRONG])
def test_wrong_calls(run: Callable[[], Any], message: str, hint: str) -> None:
    with pytest.raises(MezzoError) as caught:
        run()
    assert (caught.value.message, caught.value.hint) == (message, hint)
    assert type(caught.value) is next((kind for text, kind in KINDS.items() if message.startswith(text)), SessionError)


def test_a_loss_that_is_not_finite_later_is_left_to_the_scale() -> None:
    session, model = small()
    train(session, model, batches(1))
    infinite(session, model)
    assert (session.updates, session.skipped) == (1, 1)
