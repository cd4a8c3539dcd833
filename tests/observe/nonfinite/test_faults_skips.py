"""Which skipped updates are normal: in a row until the first that is made, then one in a growth interval."""

from __future__ import annotations

import random

import pytest
import torch

from mezzo.observe.nonfinite.faults import SkipRule, Skips

DYNAMIC, STATIC = SkipRule(dynamic=True, growth_interval=10), SkipRule(dynamic=False)


def faulty(pattern: str, rule: SkipRule = DYNAMIC) -> list[int]:
    """Return the faulty steps of a run whose updates are made (``.``) or skipped (``x``)."""
    skips = Skips()
    for step, mark in enumerate(pattern, 1):
        skips.closed(step, {}, skipped=mark == "x", rule=rule)
    return skips.steps()


PATTERNS: list[tuple[str, list[int]]] = [
    # the updates of a run, the steps whose skips are faults
    ("......", []),
    ("xxx.....", []),
    ("xxxxxxxx.", []),
    ("x" * 16 + ".", []),
    ("xxx", [1, 2, 3]),  # never made
    ("xx...x....", []),  # one later
    ("xx...x...x..", [6, 10]),
    ("...x.x", [4, 6]),
    ("...xx", [4, 5]),
    (".x.........x", []),  # ten updates apart
    (".x........x", [2, 11]),  # nine
    ("." + ".........x" * 5, []),  # as a scale that grows and falls back
    ("x.x.x.x.", [3, 5, 7]),
    (".xx.......", []),  # the first batch's gradients happened to be small
    ("xx.xxx....", []),
    (".xx", [2, 3]),  # never made again
    (".xx..x....", [2, 6]),
    ("..xx......", [3, 4]),
    ("..x..x" + "." * 20 + "x", [3, 6]),
]


@pytest.mark.parametrize(("pattern", "expected"), PATTERNS)
def test_skips_of_a_dynamic_scale(pattern: str, expected: list[int]) -> None:
    assert faulty(pattern) == expected


@pytest.mark.parametrize(("pattern", "expected"), [("...", []), (".x.", [2]), ("x..", [1]), ("xx.x", [1, 2, 4])])
def test_every_skip_of_a_static_scale_is_a_fault(pattern: str, expected: list[int]) -> None:
    assert faulty(pattern, STATIC) == expected


@pytest.mark.parametrize(
    ("pattern", "hysteresis", "expected"),
    [(".xx.", 2, []), ("..xxx.", 2, [3, 5]), (".xx.xx", 2, [2, 5]), (".xx", 1, [2, 3])],
)
def test_what_a_hysteresis_bears_counts_as_one(pattern: str, hysteresis: int, expected: list[int]) -> None:
    assert faulty(pattern, SkipRule(dynamic=True, growth_interval=10, hysteresis=hysteresis)) == expected


def test_each_optimizer_has_to_find_the_scale_for_itself() -> None:
    skips = Skips()
    for step in range(1, 13):  # critic and generator in turn; the generator's gradients need four halvings
        optimizer = step % 2
        skipped = optimizer == 0 and step <= 8
        skips.closed(step, {(0, optimizer): skipped}, skipped=skipped, rule=DYNAMIC)
    assert skips.steps() == []
    skips.closed(14, {(0, 0): True}, skipped=True, rule=DYNAMIC)
    skips.closed(16, {(0, 0): True}, skipped=True, rule=DYNAMIC)
    assert skips.steps() == [14, 16]


def test_an_optimizer_that_never_makes_an_update_is_a_fault_beside_one_that_does() -> None:
    skips = Skips()
    for step in range(1, 9):
        skipped = step % 2 == 0
        skips.closed(step, {(0, step % 2): skipped}, skipped=skipped, rule=DYNAMIC)
    assert skips.steps() == [2, 4, 6, 8]
    assert skips.settled()


def test_torchs_own_scaler_on_gradients_that_fit_never_makes_a_fault() -> None:
    """Noise of a factor of 1.5 around a magnitude that needs up to 20 halvings; the scale grows every 12 updates."""
    dice = random.Random(0)
    for magnitude in (2.0**k for k in range(21)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=12)
        scaler.scale(torch.ones(1))
        skips = Skips()
        for step in range(1, 120):
            weight = torch.nn.Parameter(torch.zeros(1))
            optimizer = torch.optim.SGD([weight], lr=0.1)
            value = 6e4 / 2**14 * magnitude * dice.uniform(1.0, 1.5) * scaler.get_scale()
            weight.grad = torch.tensor([value if value <= 65504 else float("inf")])
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skips.closed(step, {}, skipped=scaler.get_scale() < before, rule=SkipRule(dynamic=True, growth_interval=12))
        assert skips.steps() == [], magnitude
