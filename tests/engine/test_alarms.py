"""Ten planted faults, each named with its step, and ten healthy runs without an alarm: synthetic, with fixed seeds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzo.engine.alarms import Alarms, UpdateNumbers

Row = tuple[float | None, float | None, bool, float | None]
"""Loss, gradient norm, skipped, loss scale."""
Case = Callable[[random.Random], Iterator[Row]]


def falling(step: int, noise: float = 0.0) -> float:
    return 0.2 + 2.1 * math.exp(-step / 80) + noise


def noisy(rng: random.Random, steps: int = 300) -> Iterator[Row]:
    for step in range(steps):
        yield falling(step, rng.gauss(0, 0.05)), abs(rng.gauss(1, 0.2)), False, None


def alarms(case: Case, seed: int = 0) -> list[tuple[str, int]]:
    watch, found = Alarms(), []
    for step, row in enumerate(case(random.Random(seed)), start=1):
        found += [(alarm.kind, alarm.step) for alarm in watch.inspect([UpdateNumbers(step, *row)])]
    return found


# --- planted ---


def nan_loss(rng: random.Random) -> Iterator[Row]:
    yield from noisy(rng, 50)
    yield from [(math.nan, math.nan, False, None)] * 20


def infinite_gradients(rng: random.Random) -> Iterator[Row]:
    yield from noisy(rng, 50)
    yield 0.5, math.inf, False, None


def nan_losses_that_are_skipped(rng: random.Random) -> Iterator[Row]:
    for k in range(40):
        yield math.nan, math.nan, True, 2.0 ** (16 - k)


def always_skipped(rng: random.Random) -> Iterator[Row]:
    for k in range(60):
        yield 2.3 + rng.gauss(0, 0.1), math.inf, True, 2.0 ** (15 - k)


def every_third_skipped(rng: random.Random) -> Iterator[Row]:
    for k in range(200):
        yield falling(k), 1.0, k % 3 == 0, 256.0


def storm_after_calm(rng: random.Random) -> Iterator[Row]:
    yield from ((loss, norm, False, 65536.0) for loss, norm, _, _ in noisy(rng, 200))
    for k in range(40):
        yield 0.4, math.inf if k % 2 else 1.0, bool(k % 2), 65536.0 / 2 ** (k // 2)


def at_the_floor(rng: random.Random) -> Iterator[Row]:
    scale = 2.0**-12
    for k in range(20):
        skipped = k % 4 == 3
        scale = scale / 2 if skipped else scale
        yield 1.0 + rng.gauss(0, 0.1), math.inf if skipped else 1.0, skipped, scale


def spike(rng: random.Random) -> Iterator[Row]:
    yield from noisy(rng, 200)
    for k in range(40):
        yield 2.0 * math.exp(-k / 30) + 0.3 + rng.gauss(0, 0.05), 5.0, False, None


def zero_gradients(rng: random.Random) -> Iterator[Row]:
    for _ in range(30):
        yield 2.3 + rng.gauss(0, 0.05), 0.0, False, None


def stuck(rng: random.Random) -> Iterator[Row]:
    yield 0.75, 1.0, False, None
    yield 0.7, 1.0, False, None
    yield from [(0.69, 0.9, False, None)] * 80


PLANTED = [
    (nan_loss, [("loss not finite", 51)]),
    (infinite_gradients, [("loss not finite", 51)]),
    (nan_losses_that_are_skipped, [("loss not finite", 5), ("skip storm", 30), ("scale at its floor", 32)]),
    (always_skipped, [("skip storm", 30), ("scale at its floor", 31)]),
    (every_third_skipped, [("skip storm", 127)]),
    (storm_after_calm, [("skip storm", 220)]),
    (at_the_floor, [("scale at its floor", 12)]),
    (spike, [("loss spike", 205)]),
    (zero_gradients, [("gradients zero", 10)]),
    (stuck, [("stuck updates", 52)]),
]


@pytest.mark.parametrize(("case", "expected"), PLANTED, ids=lambda c: getattr(c, "__name__", ""))
def test_planted_faults_are_named_with_their_step(case: Case, expected: list[tuple[str, int]]) -> None:
    assert alarms(case) == expected


def test_stuck_updates_began_with_the_first_of_the_equal_losses() -> None:
    watch = Alarms()
    found = [
        alarm
        for step, row in enumerate(stuck(random.Random(0)), start=1)
        for alarm in watch.inspect([UpdateNumbers(step, *row)])
    ]
    assert [alarm.since for alarm in found] == [3]


# --- healthy ---


def warm_up_of_a_dynamic_scale(rng: random.Random) -> Iterator[Row]:
    scale = 2.0**24
    for k in range(400):
        skipped = scale > 2.0**6 and (k < 20 or rng.random() < 0.5)
        scale = scale / 2 if skipped else scale
        yield falling(k, rng.gauss(0, 0.05)), math.inf if skipped else 1.0, skipped, scale


def scale_that_probes_often(rng: random.Random) -> Iterator[Row]:
    for k in range(400):  # growth_interval=5
        yield falling(k), 1.0, k % 6 == 5, 1024.0 if k % 6 == 5 else 2048.0


def gan(rng: random.Random) -> Iterator[Row]:
    for k in range(1000):
        cycle = math.sin(k / 60)
        discriminates = 1.2 + 0.8 * cycle + rng.expovariate(4)
        yield discriminates if k % 2 else 2.5 - 1.5 * cycle + rng.expovariate(1), abs(rng.gauss(2, 1)), False, None


def reinforcement(rng: random.Random) -> Iterator[Row]:
    for _ in range(2000):  # a policy's loss: around zero, with the tails of a Cauchy distribution
        yield math.tan(math.pi * (rng.random() - 0.5)), rng.expovariate(1), False, None


def hard_batches(rng: random.Random) -> Iterator[Row]:
    for k in range(600):
        yield falling(k, rng.gauss(0, 0.02)) * (20 if k % 37 in (0, 1) else 1), 1.0, False, None


def restarts(rng: random.Random) -> Iterator[Row]:
    for k in range(600):  # cosine restarts: the loss jumps, and stays far below where it began
        yield 0.05 + 2.2 * math.exp(-k / 40) + (0.3 * math.exp(-(k % 200) / 20) if k >= 200 else 0), 1.0, False, None


def frozen_parts(rng: random.Random) -> Iterator[Row]:
    for k in range(300):  # one of two optimizers has nothing to do for a while
        yield 0.7 + rng.gauss(0, 0.02), 0.0 if k % 12 < 8 else 1e-6, False, None


def all_separated(rng: random.Random) -> Iterator[Row]:
    yield from noisy(rng, 50)
    yield from [(0.0, 0.0, False, None)] * 100  # a hinge loss of 0: every sample is on its side


def converged(rng: random.Random) -> Iterator[Row]:
    for k in range(300):
        yield 0.125 + 2.0**-k, max(2.0**-k, 1e-8), False, None


def at_rest(rng: random.Random) -> Iterator[Row]:
    yield 9.0, 100.0, False, None
    yield from [(0.69, 0.5, False, None)] * 80  # gradients below a hundredth of the first: the loss may stay the same


def one_skip_now_and_then(rng: random.Random) -> Iterator[Row]:
    for k in range(1000):
        skipped = rng.random() < 0.05
        yield math.inf if skipped else falling(k, rng.gauss(0, 0.1)), math.inf if skipped else 1.0, skipped, 512.0


HEALTHY: list[Case] = [
    warm_up_of_a_dynamic_scale,
    scale_that_probes_often,
    gan,
    reinforcement,
    hard_batches,
    restarts,
    frozen_parts,
    all_separated,
    converged,
    at_rest,
    one_skip_now_and_then,
]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("case", HEALTHY)
def test_healthy_trainings_raise_nothing(case: Case, seed: int) -> None:
    assert alarms(case, seed) == []


def test_what_is_not_known_raises_nothing() -> None:
    assert alarms(lambda rng: iter([(None, None, False, None)] * 500)) == []


def test_an_alarm_says_since_when_and_by_what_limit() -> None:
    watch = Alarms()
    found = [
        a for k, row in enumerate(spike(random.Random(0)), start=1) for a in watch.inspect([UpdateNumbers(k, *row)])
    ]
    assert [alarm.since for alarm in found] == [201]
    assert found[0].evidence.startswith("the last 5 losses are 2.")
    assert "the median of the 64 before is 0." in found[0].evidence
    assert "1.4826 MAD 0." in found[0].evidence


def test_a_storm_of_skips_began_with_the_first_of_the_row() -> None:
    calm = [UpdateNumbers(step, 1.0, 1.0, False, 65536.0) for step in range(1, 5)]
    row = [UpdateNumbers(step, 1.0, math.inf, True, 2.0 ** (20 - step)) for step in range(5, 35)]
    (alarm,) = Alarms().inspect([*calm, *row])
    assert (alarm.kind, alarm.step, alarm.since) == ("skip storm", 34, 5)
    assert alarm.evidence == "30 updates in a row were skipped; the loss scale is 6.10352e-05, from 65536"


def test_after_forgetting_a_kind_is_raised_again() -> None:
    watch = Alarms()
    bad = UpdateNumbers(1, math.nan, math.nan, False, None)
    assert [a.kind for a in watch.inspect([bad])] == ["loss not finite"]
    assert list(watch.inspect([bad])) == []
    watch.forget()
    assert [a.kind for a in watch.inspect([bad])] == ["loss not finite"]


def test_a_policys_own_floor_counts() -> None:
    watch = Alarms(floor=1.0)
    assert list(watch.inspect([UpdateNumbers(1, 1.0, math.inf, True, 1.0)])) == []  # it came to the floor by this skip
    assert [a.kind for a in watch.inspect([UpdateNumbers(2, 1.0, math.inf, True, 1.0)])] == ["scale at its floor"]


ROWS = st.tuples(
    st.sampled_from([None, 0.0, 0.5, 1.0, 1.0, 1.25, 9.0, -1.0, math.inf, -math.inf, math.nan]),
    st.sampled_from([None, None, None, 0.0, 1.0, math.inf]),
    st.sampled_from([False, False, False, True]),
    st.sampled_from([None, 2.0**-14, 1024.0]),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.lists(ROWS, min_size=1, max_size=4), min_size=1, max_size=30), st.integers(1, 40))
def test_the_short_way_of_calm_updates_remembers_the_same(rows: list[list[tuple[Any, ...]]], at_once: int) -> None:
    short, long = Alarms(), Alarms()
    updates = [row for some in rows for row in some * 5]  # in stretches, so that signs which need many in a row come up
    every = [UpdateNumbers(step, *row) for step, row in enumerate(updates, start=1)]
    for first in range(0, len(every), at_once):
        some = every[first : first + at_once]
        expected = [a.model_dump() for seen in some for a in long._check_signs(seen)]
        assert [a.model_dump() for a in short.inspect(some)] == expected
        assert repr(vars(short)) == repr(vars(long))  # by text: NaN is not equal to itself
