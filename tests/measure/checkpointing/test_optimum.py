"""The plan with the least recomputation, against every plan there is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers_values import existing
from mezzo.engine.checkpointing import Keeps
from mezzo.measure.checkpointing import optimum
from mezzo.measure.checkpointing.optimum import (
    FLOPS_PER_BYTE,
    Paths,
    best_plan,
    candidates_of,
    costs_of,
    forward_cost,
    least_peak,
)
from mezzo.measure.checkpointing.trace import Computed, ForwardTrace, ModuleCall, SavedTensor, trace


def every_plan(traced: ForwardTrace) -> Iterator[dict[str, Keeps]]:
    """Yield each choice of candidates that do not lie within each other."""
    ways: dict[str, list[Keeps | None]] = {}
    for candidate in candidates_of(traced):
        ways[candidate.call.module] = [None, *candidate.regions]
    for combination in itertools.product(*ways.values()):
        chosen = {name: keeps for name, keeps in zip(ways, combination, strict=True) if keeps is not None}
        if not any(one != other and is_inside(one, other) for one in chosen for other in chosen):
            yield chosen


def is_inside(one: str, other: str) -> bool:
    return other == "" or one.startswith(f"{other}.")


def cost(traced: ForwardTrace, choice: dict[str, Keeps]) -> int:
    found = costs_of(traced, choice)
    return found.recomputed_flops + FLOPS_PER_BYTE * found.recomputed_moved_bytes


def check_all_budgets(traced: ForwardTrace) -> None:
    plans = [(choice, costs_of(traced, choice).peak_bytes, cost(traced, choice)) for choice in every_plan(traced)]
    for budget in sorted({peak for _, peak, _ in plans}):
        within = min(price for _, peak, price in plans if peak <= budget)
        found = existing(best_plan(traced, budget))
        assert found.slack == 0
        assert costs_of(traced, found.regions).peak_bytes <= budget
        assert cost(traced, found.regions) == within
    least = min(peak for _, peak, _ in plans)
    assert best_plan(traced, least - 1) is None


# --- traces of models -------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, *, norm: bool) -> None:
        super().__init__()
        self.norm: nn.Module = nn.BatchNorm1d(width) if norm else nn.LayerNorm(width)
        self.up, self.drop, self.down = nn.Linear(width, hidden), nn.Dropout(0.1), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(self.drop(torch.tanh(self.up(self.norm(x))).sigmoid()))
        return result


class Skips(nn.Module):
    """A small U-net: what the way down computes is used again on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.up = nn.ModuleList(nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Dropout(0.1)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for part in self.down:
            x = part(x)
            kept.append(x)
        for part in self.up:
            x = part(torch.cat([x, kept.pop()], -1))
        return x


class Again(nn.Module):
    """One block that runs three times, between others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = Block(8, 16, norm=False), Block(8, 32, norm=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.first(x))
        result: Tensor = self.again(self.again(x))
        return result


MODELS = {
    "alike": lambda: nn.Sequential(*(Block(8, 16, norm=True) for _ in range(3))),
    "unlike": lambda: nn.Sequential(*(Block(8, hidden, norm=False) for hidden in (8, 64, 24)), nn.Linear(8, 2)),
    "skips": Skips,
    "again": Again,
}


@pytest.mark.parametrize("name", MODELS)
def test_no_plan_is_better(name: str) -> None:
    model = MODELS[name]()
    check_all_budgets(trace(model, lambda m: m(torch.randn(8, 8))))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_plan_is_better_on_any_trace(data: st.DataObject) -> None:
    """Calls of any lengths and depths that share storages in any way; one module may be called twice."""
    check_all_budgets(any_trace(data))


def any_trace(data: st.DataObject) -> ForwardTrace:
    storages = range(7)
    some = st.frozensets(st.sampled_from(storages), max_size=3)
    events: list[Computed | SavedTensor] = []
    calls: list[ModuleCall] = []
    for number in range(data.draw(st.integers(1, 4))):
        parts = data.draw(st.integers(0, 2))
        outer = ModuleCall(
            module=data.draw(st.sampled_from([f"m{number}", "m0"])), begin=len(events), end=0, arguments=data.draw(some)
        )
        calls.append(outer)
        for part in range(max(1, parts)):
            inner = ModuleCall(module=f"{outer.module}.{part}", begin=len(events), end=0, arguments=data.draw(some))
            for _ in range(data.draw(st.integers(1, 2))):
                events.append(
                    Computed(data.draw(st.integers(0, 9)), data.draw(st.integers(0, 2)), data.draw(st.booleans()))
                )
                events.append(SavedTensor(data.draw(st.sampled_from(storages)), True))
            inner.end, inner.products = len(events), data.draw(some)
            if parts:
                calls.append(inner)
        outer.end, outer.products = len(events), data.draw(some)
        outer.copied_bytes = data.draw(st.integers(0, 2))
        events.append(SavedTensor(data.draw(st.sampled_from(storages)), True))
    sizes = {storage: data.draw(st.integers(1, 20)) for storage in storages}
    return ForwardTrace(events=events, sizes=sizes, calls=calls, classes={call.module: "M" for call in calls})


def chain(costs: Sequence[int]) -> ForwardTrace:
    """Return a chain of calls, each with storages of its own, that save as much as they cost."""
    events: list[Computed | SavedTensor] = []
    calls, sizes = [], {0: 0}
    for number, price in enumerate(costs):
        begin = len(events)
        sizes[2 * number + 1], sizes[2 * number + 2] = price, 0
        events += [Computed(price * 1000, 0, True), SavedTensor(2 * number + 1, True)]
        calls.append(ModuleCall(module=f"m{number}", begin=begin, end=len(events), arguments=frozenset({2 * number})))
    return ForwardTrace(events=events, sizes=sizes, calls=calls, classes={call.module: "M" for call in calls})


def test_many_unlike_modules_are_within_a_hundredth_of_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every subset has a sum of its own: too many labels to follow exactly, and the guarantee is the weaker one."""
    traced = chain([2**k + 17 for k in range(12)])
    budget = costs_of(traced, {}).kept_bytes * 2 // 5 + 2049
    monkeypatch.setattr(optimum, "MOST_LABELS", 10**6)
    exact = existing(best_plan(traced, budget))
    monkeypatch.setattr(optimum, "MOST_LABELS", 1400)
    found = existing(best_plan(traced, budget))
    assert (exact.slack, found.slack) == (0, forward_cost(traced) // 100)
    assert costs_of(traced, found.regions).peak_bytes <= budget
    assert 0 <= cost(traced, found.regions) - cost(traced, exact.regions) <= found.slack


def test_the_least_budget_is_found_and_named() -> None:
    traced = trace(MODELS["unlike"](), lambda m: m(torch.randn(8, 8)))
    least = min(costs_of(traced, choice).peak_bytes for choice in every_plan(traced))
    assert least <= least_peak(traced) <= least * 1.01


def test_a_refused_call_is_no_candidate() -> None:
    traced = chain([10, 10])
    traced.calls[0].refused = "an input is changed in place later"
    assert [candidate.call.module for candidate in candidates_of(traced)] == ["m1"]
    assert Paths(traced, candidates_of(traced), 10**9, slack=0).shortest() == {}


def test_a_call_may_keep_its_products_unless_it_has_none_or_they_are_refused() -> None:
    """``every_plan`` takes its ways from the candidates themselves, and so cannot miss one."""
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Sigmoid()), nn.Sequential(nn.Tanh(), nn.Tanh()))
    traced = trace(model, lambda m: m(torch.randn(8, 8)))
    found = {one.call.module: [*one.regions] for one in candidates_of(traced)}
    assert (found["0"], found["1"]) == (["inputs", "products"], ["inputs"])
    next(call for call in traced.calls if call.module == "0").products_refused = "its output is changed in place"
    assert {one.call.module: [*one.regions] for one in candidates_of(traced)}["0"] == ["inputs"]
