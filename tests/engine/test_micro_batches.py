"""Batches trained on in parts: the full batch's mathematics, and runs in which memory runs out at any place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mezzo
from mezzo import Session, SessionError

BATCH, UPDATES = 8, 8
Weights = list[Tensor]
Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """A small classifier."""

    def __init__(self, *, norm: bool, dropout: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
        self.norm: nn.Module = nn.BatchNorm1d(16) if norm else nn.LayerNorm(16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.dropout(torch.relu(self.norm(self.first(x))))
        result: Tensor = self.last(hidden)
        return result


class Memory:
    """Runs out once, in the forward or the backward pass of one micro-batch."""

    def __init__(self, at: int | None = None, *, where: str = "forward") -> None:
        self.at, self.where, self.calls = at, where, 0
        self.sizes: list[int] = []

    def compute(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        self.sizes.append(len(x))
        loss = F.cross_entropy(model(x), y)
        if self.calls == self.at:
            if self.where == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            loss = _Fails.apply(loss) if self.where == "backward" else loss  # type: ignore[no-untyped-call]
            if self.where == "middle":  # some gradients are added to already
                next(model.children()).weight.register_hook(_fail_once())  # type: ignore[operator, union-attr]
        return loss


def _fail_once() -> Callable[[Tensor], None]:
    left = [True]

    def fail(_: Tensor) -> None:
        if left.pop() if left else False:
            raise torch.OutOfMemoryError("out of memory in the middle of a backward pass")

    return fail


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("out of memory in a backward pass")


def batches() -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(UPDATES):
        yield torch.randn(BATCH, 6, generator=generator), torch.randint(0, 3, (BATCH,), generator=generator)


def state(model: nn.Module) -> Weights:
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


def build(*, norm: bool = True, dropout: float = 0.2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net(norm=norm, dropout=dropout)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def feed(session: Session, batch: Batch, memory: Memory | None = None) -> Tensor:
    """Train on a batch by ``train_batch``; return its loss."""
    compute = (memory or Memory()).compute
    return session.train_batch(lambda x, y: compute(session.models[0], x, y), *batch)


def trained(policy: str, memory: Memory, *, accumulate: int = 1, clip: float | None = 1.0, **how: Any) -> Weights:
    """Train in ``UPDATES`` batches with ``train_batch``."""
    model, optimizer = build(**how)
    session = Session(model, optimizer, policy=policy, micro_batch="auto", accumulate=accumulate, clip_norm=clip)
    for batch in batches():
        feed(session, batch, memory)
    assert session.updates + session.skipped == UPDATES // accumulate
    return state(model)


def by_hand(policy: str, sizes: Sequence[int], *, accumulate: int = 1, clip: float | None = 1.0, **how: Any) -> Weights:
    """Train with ``backward`` and ``update`` alone, batch ``i`` in parts of ``sizes[i]``: nothing ever fails."""
    model, optimizer = build(**how)
    session = Session(model, optimizer, policy=policy, accumulate=accumulate, clip_norm=clip)
    for number, ((x, y), size) in enumerate(zip(batches(), sizes, strict=True), start=1):
        session.state.window.set_unit(float(BATCH))
        for begin in range(0, BATCH, size):
            with session.autocast():
                loss = F.cross_entropy(model(x[begin : begin + size]), y[begin : begin + size])
            session.backward(loss, weight=size)
        if number % accumulate == 0:
            session.update()
    return state(model)


@functools.cache
def undisturbed_run(policy: str, sizes: tuple[int, ...]) -> Weights:
    """Return what ``by_hand`` does, once for all places where memory runs out."""
    return by_hand(policy, sizes)


def with_torch(sizes: Sequence[int]) -> Weights:
    """Train in FP32 with nothing of Mezzo's."""
    model, optimizer = build()
    for (x, y), size in zip(batches(), sizes, strict=True):
        for begin in range(0, BATCH, size):
            part = F.cross_entropy(model(x[begin : begin + size]), y[begin : begin + size])
            (part * (size / BATCH)).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


def same(one: Weights, other: Weights) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


WHERE = ("forward", "backward", "middle")
PLACES = [*(("fp16", where) for where in WHERE), *zip(("fp32", "bf16", "fp16-master"), WHERE, strict=True)]


@pytest.mark.parametrize(("policy", "where"), PLACES)
def test_memory_that_runs_out_in_any_update_changes_no_bit(policy: str, where: str) -> None:
    undisturbed = {}
    for update in range(UPDATES):
        memory = Memory(update + 1, where=where)
        got = trained(policy, memory)
        sizes = [BATCH] * update + [BATCH // 2] * (UPDATES - update)
        assert memory.sizes == [BATCH] * (update + 1) + [BATCH // 2] * 2 * (UPDATES - update)
        undisturbed[update] = undisturbed_run(policy, tuple(sizes))
        assert same(got, undisturbed[update]), f"update {update}"
    assert not same(undisturbed[0], undisturbed[5])  # batch normalisation distinguishes the splits


@pytest.mark.parametrize("call", range(2, 2 + 2 * UPDATES))
def test_memory_that_runs_out_twice(call: int) -> None:
    """The first micro-batch fails, and so does any later one: its batch and all after it are trained on in quarters."""
    memory = Memory(call, where=WHERE[call % 3])
    compute = memory.compute

    def first_fails(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if len(x) == BATCH:
            memory.calls += 1
            raise torch.OutOfMemoryError("out of memory")
        return compute(model, x, y)

    memory.compute = first_fails  # type: ignore[method-assign]
    update = (call - 2) // 2
    got = trained("fp16", memory)
    assert same(got, by_hand("fp16", [4] * update + [2] * (UPDATES - update)))


def test_the_oracle_is_torch() -> None:
    sizes = [8] * 7 + [4] * (UPDATES - 7)
    assert same(by_hand("fp32", sizes), with_torch(sizes))
    assert same(trained("fp32", Memory(8)), with_torch(sizes))
    assert same(trained("fp32", Memory()), with_torch([8] * UPDATES))


@pytest.mark.parametrize(("policy", "call"), [("fp32", 1), ("fp16", 2), ("bf16", 3), ("fp32", 7)])
def test_earlier_batches_of_a_window_are_kept(policy: str, call: int) -> None:
    got = trained(policy, Memory(call, where="middle"), accumulate=4, norm=False)
    sizes = [BATCH] * (call - 1) + [BATCH // 2] * (UPDATES - call + 1)
    expected = by_hand(policy, sizes, accumulate=4, norm=False)
    for a, b in zip(got, expected, strict=True):  # gradients of a batch are added up before they join the window's
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 if policy == "fp32" else 2e-3)


@pytest.mark.parametrize("where", WHERE)
def test_a_window_of_several_batches_changes_no_bit_either(where: str) -> None:
    """Memory that runs out costs nothing beyond the split: the run with the same split from the start of that batch."""
    for call in (1, 4, 5, 8):  # the first and the last batch of a window
        got = trained("fp16", Memory(call, where=where), accumulate=4)
        again = _split_from(call)
        assert same(got, again), call


def _split_from(batch: int) -> Weights:
    model, optimizer = build()
    session = Session(model, optimizer, policy="fp16", micro_batch="auto", accumulate=4, clip_norm=1.0)
    for number, given in enumerate(batches(), start=1):
        if number == batch:
            session.train_batch.size = BATCH // 2
        feed(session, given)
    return state(model)


def test_parts_give_the_full_batchs_update_where_nothing_mixes_samples() -> None:
    whole = trained("fp32", Memory(), norm=False, dropout=0.0)
    parts = trained("fp32", Memory(1), norm=False, dropout=0.0)
    assert not same(whole, parts)  # sums are rounded in another order
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("size", "parts"), [(8, [8]), (5, [4, 4]), (3, [2, 3, 3]), (1, [1] * 8), (100, [8])])
def test_parts_are_as_equal_as_can_be(size: int, parts: list[int]) -> None:
    model, optimizer = build(norm=False)
    session = Session(model, optimizer, policy="fp32", micro_batch=size)
    memory = Memory()
    feed(session, next(batches()), memory)
    assert memory.sizes == parts


def test_tokens_weigh_parts_and_a_part_without_tokens_counts_nothing() -> None:
    """The loss of a batch is the mean over its tokens, which parts have different numbers of."""
    torch.manual_seed(0)
    x, kept = torch.randn(8, 5, 6), torch.rand(8, 5) < 0.4
    kept[:2] = False

    def mean(x: Tensor, kept: Tensor) -> tuple[Tensor, int]:
        return model(x)[kept].square().mean(), int(kept.sum())

    results = []
    for size in (None, 2):
        model, optimizer = build(norm=False, dropout=0.0)
        session = Session(model, optimizer, policy="fp32", micro_batch=size)
        loss = session.train_batch(mean, x, kept)
        results.append([loss, *state(model)])
        assert session.updates == 1
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_loss_is_the_batchs_mean() -> None:
    model, optimizer = build(norm=False, dropout=0.0)
    x, y = next(batches())
    expected = F.cross_entropy(model(x), y).detach()
    session = Session(model, optimizer, policy="fp32", micro_batch=3)
    loss = feed(session, (x, y))
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected)


def test_dicts_scalars_and_strings_go_where_they_belong() -> None:
    model, optimizer = build(norm=False)
    session = Session(model, optimizer, policy="fp32", micro_batch=4)
    seen = []

    def compute(batch: dict[str, Any], factor: Tensor, name: str) -> Tensor:
        seen.append((len(batch["x"]), len(batch["more"][0]), float(factor), name))
        return model(batch["x"]).square().mean() * factor  # type: ignore[no-any-return]

    x, y = next(batches())
    session.train_batch(compute, {"x": x, "more": [y]}, torch.tensor(2.0), "name")
    assert seen == [(4, 4, 2.0, "name")] * 2


def test_what_does_not_fit_says_so_and_leaves_the_window_as_it_was() -> None:
    model, optimizer = build()
    session = Session(model, optimizer, policy="fp16", micro_batch="auto", accumulate=2)
    x, y = next(batches())
    feed(session, (x, y))
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    buffers = [b.clone() for b in model.buffers()]
    calls = []

    def never(x: Tensor, y: Tensor) -> Tensor:
        calls.append(len(x))
        if len(x) > 1:  # batch normalisation refuses one
            model(x).sum()
        raise torch.OutOfMemoryError("Tried to allocate 80 GiB")

    with pytest.raises(SessionError, match="a micro-batch of one sample does not fit: Tried to allocate 80 GiB"):
        session.train_batch(never, x.repeat(2, 1), y.repeat(2))
    assert calls == [16, 8, 4, 2, 1]
    assert same(before, [p.grad for p in model.parameters() if p.grad is not None])
    assert same(buffers, list(model.buffers()))
    session.train_batch.size = None
    feed(session, (x, y))
    assert session.updates == 1


def test_memory_that_runs_out_in_the_update_is_an_error() -> None:
    class Full(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise torch.OutOfMemoryError("the optimizer's state")

    model, _ = build()
    session = Session(model, Full(model.parameters(), lr=0.1), policy="fp32", micro_batch="auto")
    with pytest.raises(torch.OutOfMemoryError, match="the optimizer's state"):
        feed(session, next(batches()))
    assert session.train_batch.halvings == 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyError, KeyboardInterrupt])
def test_without_micro_batch_an_error_leaves_all_as_it_was(error: type[BaseException]) -> None:
    model, optimizer = build()
    session = Session(model, optimizer, policy="fp32", accumulate=2)
    all_batches = batches()
    feed(session, next(all_batches))
    before, random = [p.grad.clone() for p in model.parameters() if p.grad is not None], torch.get_rng_state()
    buffers = [b.clone() for b in model.buffers()]

    def fails(x: Tensor, y: Tensor) -> Tensor:
        model(x)
        raise error("no more")

    with pytest.raises(error):
        session.train_batch(fails, *next(all_batches))
    assert same(before, [p.grad for p in model.parameters() if p.grad is not None])
    assert same(buffers, list(model.buffers()))
    assert torch.equal(random, torch.get_rng_state())


def test_it_says_what_it_does() -> None:
    model, optimizer = build()
    session = Session(model, optimizer, policy="fp32", micro_batch="auto")
    [choice] = [c for c in session.explain() if c.what == "micro-batches"]
    assert choice.value == "whole batches"
    assert choice.reason == (
        "halved when memory runs out; 1 batch normalisation normalises over a part, and updates running statistics once per part"
    )
    feed(session, next(batches()), Memory(1))
    [choice] = [c for c in session.explain() if c.what == "micro-batches"]
    assert (choice.value, choice.reason.partition(";")[0]) == ("at most 4 samples", "memory ran out once")


WRONG: list[tuple[Callable[[Session, nn.Module], Any], str]] = [
    (lambda s, m: s.train_batch(m, torch.ones(3, 6), torch.ones(4)), "train_batch() got tensors with 3, 4 rows"),
    (lambda s, m: s.train_batch(m, torch.tensor(1.0)), "train_batch() got tensors with no rows"),
    (lambda s, m: s.train_batch(m, torch.ones(0, 6)), "train_batch() got tensors with 0 rows"),
    (
        lambda s, m: s.train_batch(lambda x: (m(x).mean(), 0), torch.ones(3, 6)),
        "every part of a batch returned a weight of 0",
    ),
    (lambda s, m: _mixed(s, m), "train_batch() after 1 backward passes of an open window"),
]


def _mixed(session: Session, model: nn.Module) -> None:
    session.backward(model(torch.ones(3, 6)).mean())
    session.train_batch(lambda x: model(x).mean(), torch.ones(3, 6))


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_wrong_calls(call: Callable[[Session, nn.Module], Any], message: str) -> None:
    model, optimizer = build(norm=False)
    session = Session(model, optimizer, policy="fp32", micro_batch="auto")
    with pytest.raises(SessionError) as error:
        call(session, model)
    assert message in str(error.value)


@pytest.mark.parametrize("wrong", ["all", 0, -1, True, 1.5])
def test_wrong_sizes(wrong: Any) -> None:
    model, optimizer = build()
    with pytest.raises(SessionError, match="allowed: 'auto', a whole number of 1 or more, or None"):
        Session(model, optimizer, micro_batch=wrong)
    with pytest.raises(SessionError, match="num_losses=2; allowed: one process and one loss scale"):
        Session(model, optimizer, micro_batch="auto", num_losses=2)


def test_masters_and_one_pass_optimizers_take_part() -> None:
    for call in (1, 4):
        runs = []
        for disturbed in (True, False):
            torch.manual_seed(0)
            model = Net(norm=True, dropout=0.2)
            optimizer = mezzo.AdamW(model.parameters(), lr=1e-2)
            session = Session(model, optimizer, policy="bf16-master", micro_batch="auto", clip_norm=0.5)
            memory = Memory(call if disturbed else None)
            for number, batch in enumerate(batches(), start=1):
                if number == call and not disturbed:
                    session.train_batch.size = BATCH // 2
                feed(session, batch, memory)
            runs.append(state(model))
        assert same(*runs)
