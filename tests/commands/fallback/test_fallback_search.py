"""The search by itself: made-up errors, of which the set to be found is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzo.commands.fallback.search import ModuleSet, search
from mezzo.observe.module_names import covered, outermost

TOLERANCE = 0.02


class Planted:
    """Fail with 0.5 for each planted module that nothing covers, and count the calls."""

    def __init__(self, *planted: str) -> None:
        self.planted, self.asked = planted, list[ModuleSet]()

    def __call__(self, kept: ModuleSet) -> float:
        self.asked.append(kept)
        missing = [name for name in self.planted if not covered(name, kept)]
        return 0.5 * len(missing) or 0.001


def names(count: int) -> list[str]:
    return [f"m{number:03}" for number in range(count)]


def is_minimal(kept: ModuleSet, verify: Callable[[ModuleSet], float]) -> bool:
    return all(not verify(tuple(n for n in kept if n != name)) <= TOLERANCE for name in kept)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_a_good_ranking_costs_few_verifications(count: int) -> None:
    ranked = names(200)
    verify = Planted(*ranked[:count])

    found = search(ranked, verify, tolerance=TOLERANCE)

    assert found == outermost(ranked[:count])
    assert len(verify.asked) == len(set(verify.asked))
    assert len(verify.asked) <= math.log2(200) + 2 * count + 2  # one more checks the set on fresh batches


@pytest.mark.parametrize(
    ("place", "count"),
    # empty, doubling up to it, halving back, then groups of 1, 2, 4 ... dropped
    [(1, 2), (2, 4), (16, 13), (100, 23), (200, 26)],
)
def test_one_module_far_down_the_ranking(place: int, count: int) -> None:
    ranked = names(200)
    verify = Planted(ranked[place - 1])
    found = search(ranked, verify, tolerance=TOLERANCE)
    assert found == (ranked[place - 1],)
    assert len(verify.asked) == count


@given(st.integers(1, 60), st.data())
@settings(deadline=None, max_examples=150, derandomize=True)
def test_any_ranking_ends_in_the_planted_set(count: int, data: st.DataObject) -> None:
    ranked = names(count)
    planted = data.draw(st.lists(st.sampled_from(ranked), unique=True, max_size=6))
    costs = {name: float(data.draw(st.integers(0, 3))) for name in ranked}
    verify = Planted(*planted)

    found = search(ranked, verify, tolerance=TOLERANCE, costs=costs)

    assert found == tuple(sorted(planted))
    assert len(verify.asked) == len(set(verify.asked))


@given(st.integers(0, 10_000))
@settings(deadline=None, max_examples=100, derandomize=True)
def test_errors_without_any_order_still_end_in_a_minimal_set_that_passes(seed: int) -> None:
    ranked = names(9)

    def verify(kept: ModuleSet) -> float:
        passes = set(kept) == set(ranked) or (bool(kept) and random.Random(f"{seed}{kept}").random() < 0.4)
        return 0.001 if passes else 0.5

    found = search(ranked, verify, tolerance=TOLERANCE)
    assert found is not None
    assert verify(found) <= TOLERANCE
    assert is_minimal(found, verify)


def test_nothing_to_keep_costs_one_verification() -> None:
    verify = Planted()
    assert search(names(50), verify, tolerance=TOLERANCE) == ()
    assert verify.asked == [()]


@pytest.mark.parametrize("error", [math.nan, math.inf, 0.021])
def test_what_no_module_mends_is_said(error: float) -> None:
    asked: list[ModuleSet] = []

    def verify(kept: ModuleSet) -> float:
        asked.append(kept)
        return error

    assert search(names(50), verify, tolerance=TOLERANCE) is None
    assert [len(kept) for kept in asked] == [0, 1, 2, 4, 8, 16, 32, 50]


def test_no_candidates() -> None:
    assert search([], Planted("x"), tolerance=TOLERANCE) is None


TREE = ["block", "block.a", "block.b", "block.b.c", "other"]
OPENED: list[tuple[list[str], tuple[str, ...], set[str], ModuleSet]] = [
    # ranked, planted, whole, found
    (TREE, ("block.a",), set(), ("block.a",)),
    (TREE, ("block.b.c", "other"), set(), ("block.b.c", "other")),
    (TREE, ("block.a",), {"block"}, ("block",)),
    (TREE, ("block",), set(), ("block",)),
    (["block.a", "block", "other"], ("block",), set(), ("block",)),
    (["other", "block.b", "block.b.c", "block"], ("block.b.c", "block.b"), set(), ("block.b",)),
]


@pytest.mark.parametrize(("ranked", "planted", "whole", "found"), OPENED)
def test_containers_are_opened_where_a_part_will_do(
    ranked: list[str], planted: tuple[str, ...], whole: set[str], found: ModuleSet
) -> None:
    verify = Planted(*planted)
    assert search(ranked, verify, tolerance=TOLERANCE, whole=whole) == found
    assert all(kept == outermost(kept) for kept in verify.asked)


def test_the_dearer_of_two_that_will_do_goes() -> None:
    def verify(kept: ModuleSet) -> float:
        return 0.001 if "a" in kept or "b" in kept else (0.3 if "c" in kept else 0.5)

    def either(kept: ModuleSet) -> float:
        return 0.001 if {"a", "c"} <= set(kept) or {"b", "c"} <= set(kept) else 0.5

    ranked = ["a", "b", "c"]
    assert search(ranked, either, tolerance=TOLERANCE, costs={"a": 5.0, "b": 1.0, "c": 9.0}) == ("b", "c")
    assert search(ranked, either, tolerance=TOLERANCE, costs={"a": 1.0, "b": 5.0, "c": 9.0}) == ("a", "c")
    assert search(["c", "b", "a"], verify, tolerance=TOLERANCE) == ("b",)


def test_a_search_goes_on_from_an_earlier_set() -> None:
    ranked = names(40)
    verify = Planted("m003", "m000")
    assert search(ranked, verify, tolerance=TOLERANCE, base=("m003", "m009")) == ("m000", "m003")
    assert verify.asked[0] == ("m003", "m009")


@pytest.mark.parametrize(
    ("given_names", "kept"),
    [
        ((), ()),
        (("b", "a", "b"), ("a", "b")),
        (("a.b", "a", "ab"), ("a", "ab")),
        (("a.b.c", "a.b", "a.bc"), ("a.b", "a.bc")),
    ],
)
def test_outermost(given_names: ModuleSet, kept: ModuleSet) -> None:
    assert outermost(given_names) == kept
