"""What a script may catch or change in the middle: a failed backward pass, another ``accumulate``, a state that does not fit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
from mezzo import Session, SessionError

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
Y = torch.tensor([0, 1, 2, 0])


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last, self.fails = nn.Linear(6, 8), nn.Linear(8, 3), False

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first(x).relu()
        return self.last(Failing.apply(inner) if self.fails else inner)  # type: ignore[no-any-return, no-untyped-call]


def build(optimizer: Any = torch.optim.SGD, **settings: Any) -> tuple[Session, Net]:
    model = Net()
    return Session(model, optimizer(model.parameters(), lr=0.1), **settings), model


def step(session: Session, model: Net, *, fails: bool = False) -> None:
    model.fails = fails
    with session.autocast():
        loss = nn.functional.cross_entropy(model(X).float(), Y)
    if fails:
        with pytest.raises(torch.OutOfMemoryError):
            session.step(loss)
    else:
        session.step(loss)


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16", "fp16-master"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, mezzo.SGD])
@pytest.mark.parametrize("at", [1, 5])
def test_a_failed_backward_pass_leaves_no_gradients(policy: str, optimizer: Any, at: int) -> None:
    caught, model = build(optimizer, policy=policy)
    never, other = build(optimizer, policy=policy)

    for number in range(8):
        if number == at:
            step(caught, model, fails=True)
        step(caught, model)
        step(never, other)

    assert same(weights(model), weights(other))
    assert caught.updates == 8


def test_a_window_with_a_failed_backward_pass_begins_again_and_says_so() -> None:
    caught, model = build(policy="fp16", accumulate=3)
    never, other = build(policy="fp16", accumulate=3)
    step(caught, model)
    with pytest.warns(mezzo.PrecisionWarning, match="the 1 micro-batches before it in its window are dropped"):
        step(caught, model, fails=True)

    for _ in range(3):
        step(caught, model)
        step(never, other)

    assert (caught.updates, never.updates) == (1, 1)
    assert same(weights(model), weights(other))


@pytest.mark.parametrize(("accumulate", "updates"), [(2, 1 + 8 // 2), (1, 1 + 8), (8, 1 + 8 // 8)])
def test_another_accumulate_counts_from_the_next_window(accumulate: int, updates: int) -> None:
    session, model = build(policy="fp32", accumulate=4)
    step(session, model)
    step(session, model)
    session.accumulate = accumulate

    for _ in range(2 + 8):
        step(session, model)

    assert session.updates == updates


def test_the_error_names_what_was_wrong() -> None:
    session, _ = build(policy="fp16")

    with pytest.raises(SessionError, match="the state does not fit this session, which is as it was: KeyError"):
        session.load_state_dict({})


@pytest.mark.parametrize("before", [0, 2, 3])
@pytest.mark.parametrize("at", [3, 5])
def test_load_in_an_open_window(before: int, at: int, tmp_path: Path) -> None:
    saved, model = build(policy="fp32", accumulate=3)
    for _ in range(at):
        step(saved, model)
    path = saved.save(tmp_path)
    assert path is not None
    file = path.wait()
    loaded, other = build(policy="fp32", accumulate=3)
    for _ in range(before):
        step(loaded, other)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded.load(file)
        for _ in range(4):
            step(saved, model)
            step(loaded, other)

    assert same(weights(model), weights(other))
