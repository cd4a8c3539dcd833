"""Masters and weights that change behind them: loaded states, clipped weights, models that are in 16 bits already."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mezzo
from helpers_engine import batches, mlp, parameters, spoil, train
from mezzo import Session

BUILDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch SGD": lambda p: torch.optim.SGD(p, lr=2.0**-6),
    "torch AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "mezzo SGD": lambda p: mezzo.SGD(p, lr=2.0**-6),
    "mezzo AdamW": lambda p: mezzo.AdamW(p, lr=1e-3, moments="8bit"),
}
every = pytest.mark.parametrize("name", BUILDS)
masters = pytest.mark.parametrize("policy", ["fp16-master", "bf16-master"])


def built(name: str, policy: str, model: nn.Module | None = None) -> tuple[Session, nn.Module]:
    held = mlp(6, 8, 3) if model is None else model
    text = f"{policy}:init_scale=64" if policy == "fp16-master" else policy
    return Session(held, BUILDS[name](held.parameters()), policy=text), held


def values(session: Session) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in session.state_dict()["models"][0].items()}


def assert_rounded(session: Session, model: nn.Module) -> None:
    for name, value in values(session).items():
        assert value.dtype is torch.float32
        assert torch.equal(value.to(dict(model.named_parameters())[name].dtype), dict(model.named_parameters())[name])


@every
@masters
def test_a_state_that_is_loaded_into_the_model_is_trained_on(name: str, policy: str) -> None:
    """As every script does: build everything, then load a checkpoint. The next update must not bring the old weights back."""
    session, model = built(name, policy)
    train(session, model, batches(2))
    wanted = {k: (v * 4).clone() for k, v in model.state_dict().items()}
    model.load_state_dict(wanted)
    train(session, model, batches(1))
    assert session.skipped == 0
    moved = values(session)
    for key in wanted:
        assert 0 < (moved[key] - wanted[key].float()).abs().max() < 0.1
    assert_rounded(session, model)


@every
@masters
def test_masters_that_nobody_changed_keep_their_low_bits(name: str, policy: str) -> None:
    other, two = built(name, policy)
    train(other, two, batches(2))
    with torch.no_grad():
        two[0].weight.add_(0.0)  # type: ignore[index, union-attr, operator] # a write that changes no value
    train(other, two, batches(1))  # the first batch again
    fresh, three = built(name, policy)
    train(fresh, three, batches(2))
    train(fresh, three, batches(1))
    for key, value in values(fresh).items():
        assert torch.equal(value, values(other)[key])


@every
@masters
def test_weights_that_are_clipped_in_place_stay_clipped(name: str, policy: str) -> None:
    session, model = built(name, policy)
    for batch in batches(6):
        train(session, model, [batch])
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.125, 0.125)
    train(session, model, batches(1))
    for value in values(session).values():
        assert value.abs().max() < 0.125 + 0.05  # one update from the bound
    assert_rounded(session, model)


@every
@pytest.mark.parametrize(("policy", "low"), [("fp16-master", torch.float16), ("bf16-master", torch.bfloat16)])
def test_a_model_in_the_policys_own_16_bits_gets_masters(name: str, policy: str, low: torch.dtype) -> None:
    model = mlp(6, 8, 3).to(low)
    start = [p.float() for p in parameters(model)]
    session, _ = built(name, policy, model)
    assert all(torch.equal(a, b) for a, b in zip(values(session).values(), start, strict=True))
    train(session, model, batches(5))
    exact = mlp(6, 8, 3)
    with torch.no_grad():
        for p, value in zip(exact.parameters(), start, strict=True):
            p.copy_(value)
    other, _ = built(name, policy, exact)
    train(other, exact, batches(5))
    for key, value in values(session).items():
        assert value.dtype is torch.float32
        assert torch.equal(value, values(other)[key])
    moved = torch.cat([(a - b).abs().flatten() for a, b in zip(values(session).values(), start, strict=True)])
    assert (moved > 0).float().mean() > 0.9  # updates far below half a unit in the last place count


@every
def test_a_checkpoint_goes_on_after_the_model_alone_was_loaded(name: str) -> None:
    first, one = built(name, "fp16-master")
    train(first, one, batches(3))
    second, two = built(name, "fp16-master")
    state = copy.deepcopy(first.state_dict())  # torch's optimizers share the tensors that they load
    two.load_state_dict(state["models"][0])
    second.load_state_dict(state)
    train(first, one, batches(2, seed=1))
    train(second, two, batches(2, seed=1))
    for key, value in values(first).items():
        assert torch.equal(value, values(second)[key])


# --- gradients that are sparse ----------------------------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 4, sparse=sparse)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(tokens))
        return out


TOKENS, CLASSES = torch.tensor([1, 1, 4, 7]), torch.tensor([0, 1, 2, 0])


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.05}, {"clip_value": 1e-3}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize("policy", ["fp32", "fp16:init_scale=64", "bf16", "fp16-master:init_scale=64"])
def test_a_sparse_embedding_trains_as_a_dense_one(policy: str, settings: dict[str, Any]) -> None:
    """A row that is used twice counts once, as its sum, in the norm and in the update."""
    if "master" in policy and "accumulate" in settings:
        pytest.skip("torch adds no sparse FP16 gradients up on a CPU")
    states, norms = [], []
    for sparse in (True, False):
        model = Words(sparse=sparse)
        session = Session(model, torch.optim.SGD(model.parameters(), lr=0.5), policy=policy, **settings)
        for _ in range(4):
            with session.autocast():
                loss = F.cross_entropy(model(TOKENS).float(), CLASSES)
            session.step(loss)
        states.append(values(session))
        norms.append(session.grad_norm)
        assert session.skipped == 0
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    for key in states[0]:
        torch.testing.assert_close(states[0][key], states[1][key], rtol=0, atol=2e-3 if "master" in policy else 1e-6)


def test_torchs_sparse_adam_takes_part() -> None:
    model = Words(sparse=True)
    optimizers = [torch.optim.SparseAdam(model.embed.parameters(), lr=0.1), torch.optim.AdamW(model.head.parameters())]
    session = Session(model, optimizers, policy="fp16:init_scale=64", clip_norm=1.0)
    before = model.embed.weight.detach().clone()
    for _ in range(3):
        with session.autocast():
            loss = F.cross_entropy(model(TOKENS).float(), CLASSES)
        session.step(loss)
    changed = (model.embed.weight != before).any(1)
    assert changed.tolist() == [row in (1, 4, 7) for row in range(9)]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_sparse_gradient_that_is_not_finite_skips_the_update(value: float) -> None:
    model = Words(sparse=True)
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.5), policy="fp16:init_scale=64:min_scale=16")
    before = parameters(model)
    for update in range(3):
        with session.autocast():
            loss = F.cross_entropy(model(TOKENS).float(), CLASSES)
        session.backward(spoil(loss, value))
        if update == 2:
            with pytest.raises(mezzo.ScaleFloorError, match=r"not finite: .*embed.weight \("):
                session.update()
        else:
            session.update()
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(model), strict=True))


@masters
def test_a_model_without_16_bit_weights_has_no_masters_and_trains(policy: str) -> None:
    session, model = built("torch SGD", policy, nn.LayerNorm(6))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    before = [p.detach().clone() for p in model.parameters()]
    with session.autocast():
        loss = model(torch.arange(6.0)).float().square().sum()
    session.step(loss)
    assert all(not torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
