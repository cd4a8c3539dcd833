"""What helps: the policies tried, and the smallest set in FP32, on distances that are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from helpers_diff import unedited
from mezzo.commands.diff.helps import Trials, candidates, modules_of, ranked, removed
from mezzo.commands.diff.record import DiffTrial
from mezzo.observe.module_names import covered
from mezzo.observe.values.log import NUMBERS, Event, Output, ValuesLog
from mezzo.policy import Policy

EVEN = dict.fromkeys("abcdefgh", 1.0)
MANY = {f"layer{n}": 1.0 for n in range(64)}


def log_of(noise: Mapping[str, float]) -> ValuesLog:
    """Return a step of one product a module, of 100 FLOPs and 32 results each, whose error is known."""
    events: list[Event] = []
    for name, error in noise.items():
        row = len(events)
        events.append(
            Event("weight", 1, "forward", "weight", f"{name}.weight", "", outputs=(Output("fp32", (8, 8)),), row=row)
        )
        result = (Output("bf16", (4, 8)),)
        events.append(
            Event("operation", 1, "forward", "linear", name, "", outputs=result, row=row + 1, flops=100, error=error)
        )
    return ValuesLog(events, np.zeros(len(events), np.int64), np.zeros((len(events), NUMBERS)))


def together(noise: Mapping[str, float]) -> Callable[[Policy], float]:
    """Return the distance under a policy, if independent errors of modules add up to it; in FP16 they are an eighth."""

    def distance(policy: Policy) -> float:
        left = [error for name, error in noise.items() if not covered(name, policy.fp32_modules)]
        return math.hypot(*left) / (8 if policy.compute == "fp16" else 1)

    return distance


def trials_of(
    noise: Mapping[str, float], distance: Callable[[Policy], float], *, policy: str = "bf16", searches: bool = True
) -> tuple[list[DiffTrial], list[Policy]]:
    """Return the trials, and the policies that ran."""
    ran: list[Policy] = []

    def run(what: str, tried: Policy) -> float:
        ran.append(tried)
        return distance(tried)

    chosen = Policy.parse(policy)
    trials = Trials(policy=chosen, same_as=None, b=log_of(noise), distance=distance(chosen), run=run)
    return trials.all(searches=searches), ran


@pytest.mark.parametrize(
    ("noise", "policy", "found", "left"),
    [
        ({"a": 1, "b": 1, "c": 100, "d": 1}, "bf16", "bf16:fp32_modules=c", math.sqrt(3)),
        ({"a": 50, "b": 1, "c": 50, "d": 1}, "bf16", "bf16:fp32_modules=a+c", math.sqrt(2)),
        ({"a": 1, "b": 1, "c": 1, "d": 1}, "bf16", "bf16:fp32_modules=b+c+d", 1.0),
        ({"a": 9, "b": 1, "c": 9, "d": 1}, "bf16:fp32_modules=a", "bf16:fp32_modules=a+c", math.sqrt(2)),
        ({"a.0": 1, "a.1": 8, "b": 1}, "bf16", "bf16:fp32_modules=a.1", math.sqrt(2)),
        ({"a": 1, "b": 1, "c": 100}, "fp16", "fp16:fp32_modules=c", math.sqrt(2) / 8),
    ],
)
def test_the_smallest_set_that_halves_the_distance(
    noise: dict[str, float], policy: str, found: str, left: float
) -> None:
    trials, ran = trials_of(noise, together(noise), policy=policy)
    assert len(set(ran)) == len(ran)
    [last] = [one for one in trials if " halves it " in one.what]
    assert (last.policy, last.distance) == (found, pytest.approx(left))
    raised = len(Policy.parse(found).fp32_modules) - len(Policy.parse(policy).fp32_modules)
    assert last.flops_in_fp32 == pytest.approx(raised / len(noise))
    assert last.more_bytes == raised * 64


def test_a_search_ends_with_the_best_so_far() -> None:
    trials, ran = trials_of(MANY, together(MANY))
    assert len(ran) == 20
    [best] = [one for one in trials if "found none smaller" in one.what]
    assert 48 <= len(Policy.parse(best.policy).fp32_modules) < 64  # three quarters of the squares have to go
    assert best.share >= 0.5


def test_code_outside_modules_is_searched_by_operations() -> None:
    def distance(policy: Policy) -> float:
        return 1.0 if "mul" in policy.fp32 else 4.0

    trials, _ = trials_of(EVEN, distance)
    assert [(one.policy, one.share) for one in trials if "operations" in one.what] == [("bf16:fp32=mul", 0.75)]
    [everything] = [one for one in trials if one.what == "all modules in fp32"]
    assert (everything.share, everything.flops_in_fp32) == (0.0, 1.0)


def test_nothing_helps() -> None:
    trials, ran = trials_of(EVEN, lambda policy: 1.0)
    assert {one.share for one in trials} == {0.0}
    assert len(ran) == 5  # FP16, the last product, the first one, all modules, all operations


def test_policies_that_fail_have_no_row() -> None:
    trials, _ = trials_of(EVEN, lambda policy: 1.0 if policy == Policy.parse("bf16") else math.inf)
    assert trials == []


def test_without_a_difference_nothing_is_tried() -> None:
    assert trials_of(EVEN, lambda policy: 0.0) == ([], [])


def test_without_a_search_only_what_needs_none_is_tried() -> None:
    trials, ran = trials_of(EVEN, together(EVEN), searches=False)
    assert [one.what for one in trials] == [
        "fp16 in place of bf16",
        "the last product in fp32 (h)",
        "the first product in fp32 (a)",
    ]
    assert len(ran) == 3


def test_the_order_of_the_search() -> None:
    noise = {"a": 2.0**-8, "b": 2.0**-4, "c": 1.1 * 2.0**-8, "d": 0.0, "e": math.nan, "f": math.inf}
    assert ranked(log_of(noise)) == ["b", "c", "a", "f", "e", "d"]


@pytest.mark.parametrize(
    ("policy", "other"),
    [
        ("bf16", "fp16"),
        ("fp16", "bf16"),
        ("bf16-pure:norms=compute", "fp16-pure:norms=compute"),
        ("bf16:fp32_modules=bf16_head", "fp16:fp32_modules=bf16_head"),
        ("fp16:init_scale=1024:widest=linear", "bf16:widest=linear"),
        ("fp8", None),
        ("bf16:gradients=bf16", "fp16:gradients=bf16"),
        ("bf16-pure:gradients=bf16", "fp16-pure"),  # whose gradients are in FP16
    ],
)
def test_the_other_16_bit_format(policy: str, other: str | None) -> None:
    a, *_ = unedited("masks")
    tried = [str(one.policy) for one in candidates(Policy.parse(policy), a) if " in place of " in one.what]
    assert tried == ([] if other is None else [str(Policy.parse(other))])


@pytest.mark.parametrize(
    ("policy", "wider"),
    [
        ("fp8", []),
        ("fp8:accumulate=fp22", ["fp8", "fp8:accumulate=fp22-128"]),
        ("fp8:accumulate=hopper", ["fp8", "fp8:accumulate=fp22-128"]),
        ("fp8:accumulate=fp22-128", ["fp8"]),
        ("bf16:gradients=bf16", ["bf16"]),
        ("bf16-pure:gradients=bf16", []),  # gradients in BF16 are their own format
    ],
)
def test_wider_sums(policy: str, wider: list[str]) -> None:
    a, *_ = unedited("masks")
    tried = [str(one.policy) for one in candidates(Policy.parse(policy), a) if "added up" in one.what]
    assert tried == wider


def test_modules_that_can_be_named() -> None:
    a, *_ = unedited("masks")
    weights = {event.module for event in a.events if event.kind == "weight"}
    named = [one.policy.fp32_modules[-1] for one in candidates(Policy.parse("bf16"), a) if one.modules]
    assert len(named) == 2
    assert all(f"{name}.weight" in weights for name in named)
    assert {name.rpartition(".")[0] for name in weights} <= modules_of(a)


@pytest.mark.parametrize(
    ("apart", "of", "share"),
    [(1.0, 4.0, 0.75), (4.0, 1.0, -3.0), (0.0, 0.0, 0.0), (1.0, math.inf, 1.0), (math.inf, math.inf, 0.0)],
)
def test_the_share_of_a_distance_that_is_gone(apart: float, of: float, share: float) -> None:
    assert removed(apart, of=of) == share
