"""Which of several policies that train alike is chosen."""

from __future__ import annotations

import pytest

from mezzo.commands.check.worth import EligiblePolicy, preferred, simplest_first
from mezzo.records import Gain


def measured(times: float, low: float, high: float) -> Gain:
    return Gain(kind="measured", times=times, low=low, high=high, device="a GPU", note="")


def bound(times: float) -> Gain:
    return Gain(kind="bound", times=times, device="a GPU", note="")


def one(policy: str, *, gain: Gain | None = None, most: float | None = None, skipped: float = 0.0) -> EligiblePolicy:
    return EligiblePolicy(policy=policy, measured=gain, bound=None if most is None else bound(most), skipped=skipped)


CASES = [
    ("the fastest measured", [one("bf16", gain=measured(2.0, 1.9, 2.1)), one("fp16", gain=measured(2.4, 2.3, 2.5))], False, "fp16"),
    ("one without a scale", [one("fp16", gain=measured(2.1, 1.9, 2.3)), one("bf16", gain=measured(2.0, 1.8, 2.2))], False, "bf16"),
    ("tf32 saves no memory", [one("tf32", gain=measured(2.0, 1.9, 2.1)), one("bf16", gain=measured(2.0, 1.9, 2.1))], False, "bf16"),
    ("measured here before emulated", [one("bf16", gain=measured(1.3, 1.2, 1.4), most=9.0), one("fp16", most=16.0)], False, "bf16"),
    ("for another GPU only bounds count", [one("bf16", gain=measured(1.3, 1.2, 1.4), most=3.0), one("fp16", most=6.0)], True, "fp16"),
    ("bounds that are alike", [one("fp16", most=6.1), one("bf16", most=6.0)], True, "bf16"),
    ("FP8's bound leaves out its scaling", [one("fp8", most=30.0), one("bf16", most=16.0)], True, "bf16"),
    ("but FP8 alone is an answer", [one("fp8", most=30.0)], True, "fp8"),
    ("FP8 that was measured", [one("fp8", gain=measured(3.0, 2.9, 3.1)), one("bf16", gain=measured(2.0, 1.9, 2.1))], False, "fp8"),
    ("the script as it is, if nothing is faster", [one("bf16", most=6.0), one("as-is", most=6.0)], False, "as-is"),
    ("a scale that skips less", [one("fp16", most=6.0, skipped=0.2), one("fp16:init_scale=1024", most=6.0)], True, "fp16:init_scale=1024"),
    ("the plain one otherwise", [one("fp16:fp32_modules=head", most=6.0), one("fp16", most=6.0)], True, "fp16"),
    ("without any gain", [one("fp16"), one("bf16")], False, "bf16"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("candidates", "by_bound", "policy"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_the_policy_that_an_expert_would_choose(candidates: list[EligiblePolicy], by_bound: bool, policy: str) -> None:
    for order in (candidates, candidates[::-1]):
        found = preferred(order, by_bound=by_bound)
        assert found is not None
        assert found.policy == policy


def test_nothing_is_chosen_of_nothing() -> None:
    assert preferred([], by_bound=True) is None


def test_policies_from_the_simplest_on() -> None:
    policies = ["fp8", "unknown", "fp16:init_scale=2", "tf32", "bf16", "as-is"]
    assert simplest_first(policies) == ["as-is", "bf16", "fp16:init_scale=2", "tf32", "fp8", "unknown"]
