"""Emulated reductions against real sums of N tensors, whose shares are drawn in another way."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from helpers_engine import batches, mlp, train
from mezzo import Session, SessionError
from mezzo.engine.processes.distributed import EmulatedWorld
from mezzo.formats import FORMATS
from mezzo.policy import Policy

SIZES = (2, 3, 64, 384)


def world(reduce: str, size: int, order: str = "ring") -> EmulatedWorld:
    return EmulatedWorld(Policy.parse(f"fp32:reduce={reduce}:world={size}:reduce_order={order}"))


def oracle(gradient: Tensor, reduce: str, size: int, order: str) -> Tensor:
    """Return the average of ``size`` tensors around ``gradient``, cast and added as processes do it, whole tensors at a time."""
    dtype = FORMATS[reduce].dtype
    noise = np.random.default_rng(1).standard_normal((size, gradient.numel()))
    noise -= noise.mean(axis=0)
    exact = gradient.double().numpy()
    shares = exact + math.sqrt(size) * np.abs(exact) * noise * math.sqrt(size / (size - 1))
    before = size if reduce != "fp16" else {2: 2, 3: 2, 8: 4, 64: 8, 384: 32}[size]
    sent = [torch.from_numpy(share / before).to(dtype) for share in shares]
    while len(sent) > 1:
        if order == "ring":
            sent = [(sent[0].double() + sent[1].double()).to(dtype), *sent[2:]]
        else:
            sent = [
                sum(pair[1:], pair[0].double()).to(dtype) for pair in (sent[i : i + 2] for i in range(0, len(sent), 2))
            ]
    return sent[0].double() * before / size


@pytest.mark.parametrize("order", ["ring", "tree"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("reduce", ["bf16", "fp16"])
def test_errors_are_distributed_as_those_of_a_real_sum(reduce: str, size: int, order: str) -> None:
    gradient = torch.randn(4000, generator=torch.Generator().manual_seed(size))
    found = gradient.clone()
    emulated = world(reduce, size, order)
    emulated.reduce([found])
    errors = ((found.double() - gradient) / gradient.abs()).numpy()
    real = ((oracle(gradient, reduce, size, order) - gradient) / gradient.abs()).numpy()
    assert np.sqrt((errors**2).mean()) == pytest.approx(np.sqrt((real**2).mean()), rel=0.06)
    assert stats.ks_2samp(errors, real).pvalue > 1e-3
    assert abs(errors.mean()) < 4 * errors.std() / math.sqrt(errors.size)  # no bias
    error = emulated.error()
    assert error == pytest.approx(float((found - gradient).norm() / gradient.norm()))


@pytest.mark.parametrize(("order", "low", "high"), [("ring", 0.6, 0.7), ("tree", 1.0, 1.0)])
def test_equal_shares_are_lost_in_a_ring_as_the_limits_say(order: str, low: float, high: float) -> None:
    """The worst case that the emulation does not draw: 384 equal shares of 1."""
    sent = [torch.ones((), dtype=torch.bfloat16)] * 384
    while len(sent) > 1:
        sent = (
            [sent[0] + sent[1], *sent[2:]]
            if order == "ring"
            else [a + b for a, b in zip(sent[::2], sent[1::2], strict=False)] + sent[len(sent) - len(sent) % 2 :]
        )
    assert low <= float(sent[0]) / 384 <= high


def test_one_gradient_gives_one_result_and_leaves_random_numbers_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    twice = [torch.linspace(-3, 3, 50_000) for _ in range(2)]
    for each in twice:
        world("bf16", 16).reduce([each])
    assert torch.equal(twice[0], twice[1])
    assert torch.equal(torch.get_rng_state(), before)


def test_zeros_stay_and_infinities_are_not_hidden() -> None:
    gradient = torch.tensor([0.0, -0.0, 1.0, math.inf, math.nan])
    world("bf16", 5).reduce([gradient])
    assert gradient[:2].tolist() == [0.0, 0.0]
    assert 0.9 < float(gradient[2]) < 1.1
    assert not gradient[3:].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_gradients_keep_their_format(dtype: torch.dtype) -> None:
    gradient = torch.linspace(1, 2, 30, dtype=torch.float64).to(dtype)
    before, place = gradient.clone(), gradient.data_ptr()
    world("bf16", 8).reduce([gradient])
    assert gradient.dtype is dtype
    assert gradient.data_ptr() == place
    assert not torch.equal(gradient, before)
    assert torch.allclose(gradient, before, rtol=0.05)


class Seen(TorchDispatchMode):
    """A counter of operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_counters_do_not_see_the_emulation() -> None:
    with Seen() as seen:
        world("bf16", 8).reduce([torch.ones(10)])
    assert seen.count == 1  # the gradient itself


# --- sessions -------------------------------------------------------------------------------------


def trained(policy: str, *, accumulate: int = 1, unscale: bool = False, updates: int = 4, **settings: Any) -> Any:
    model = mlp(6, 9, 3)
    session = Session(
        model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy, accumulate=accumulate, **settings
    )
    for x, y in batches(updates * accumulate):
        with session.autocast():
            loss = F.cross_entropy(model(x), y)
        session.backward(loss)
        if session.state.window.calls == accumulate:
            if unscale:
                session.unscale()
            session.update()
    return [p.detach().clone() for p in model.parameters()], session


def test_a_session_reduces_each_window_once() -> None:
    """Against the same loop, written out."""
    emulated = world("bf16", 64)
    model = mlp(6, 9, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = batches(8)
    for update in range(4):
        for x, y in data[2 * update : 2 * update + 2]:
            (F.cross_entropy(model(x), y) / 2).backward()
        emulated.reduce([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    for unscale in (False, True):
        found, session = trained("fp32:reduce=bf16:world=64", accumulate=2, unscale=unscale)
        assert all(torch.equal(a, b) for a, b in zip(found, model.parameters(), strict=True))
        choice = next(c for c in session.explain() if c.what == "processes")
        assert choice.value == "64, emulated"
        assert f"so far it changes the gradients by {emulated.error():.1e} of their norm" in choice.reason
    exact, _ = trained("fp32", accumulate=2)
    assert not any(torch.equal(a, b) for a, b in zip(exact, model.parameters(), strict=True))


def test_fp16_sums_that_overflow_are_skipped() -> None:
    weights, session = trained("fp16:reduce=fp16:world=384:init_scale=1048576:fp32=linear+cross_entropy", updates=1)
    assert (session.skipped, session.loss_scale) == (1, 524288.0)
    assert all(torch.equal(a, b) for a, b in zip(weights, mlp(6, 9, 3).parameters(), strict=True))
    _, wide = trained("fp16:reduce=bf16:world=384:init_scale=1048576:fp32=linear+cross_entropy", updates=1)
    assert wide.skipped == 0


def test_master_weights_and_one_pass_optimizers_take_the_reduced_gradients() -> None:
    import mezzo

    for policy in ("bf16-master", "fp16-master"):
        found = []
        for text in (policy, f"{policy}:reduce=bf16:world=384"):
            model = mlp(6, 9, 3)
            session = Session(model, mezzo.AdamW(model.parameters(), lr=1e-2), policy=text, clip_norm=1.0)
            train(session, model, batches(3))
            found.append(torch.cat([p.detach().float().reshape(-1) for p in model.parameters()]))
        assert not torch.equal(found[0], found[1])
        assert torch.allclose(found[0], found[1], atol=0.06)  # three steps of 1e-2, each at most reversed


def test_a_step_with_an_emulated_reduction_is_not_captured() -> None:
    model = nn.Linear(2, 1)
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp32:reduce=bf16:world=8")
    with pytest.raises(SessionError):
        session.capture(lambda x: model(x).sum(), torch.ones(1, 2))
