"""Which error counts: rounding alone needs no modules, a set with most of the FLOPs does not pay, the batches stay the same."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from mezzo.commands.fallback.find import find
from mezzo.commands.fallback.search import Allowed, TrialsAhead, stand_out
from mezzo.observe.fallback.evidence import LocalError, Measured, StepErrors
from mezzo.observe.module_names import covered
from mezzo.observe.settings import FallbackSettings
from mezzo.policy import Policy
from mezzo.records import FallbackRecord, RunRecord
from record_builders import run_record

HEALTHY = {"output": 5e-4, "dgrad": 4e-4, "wgrad": 3e-4, "rounded": 8e-3}
FLOPS = {"stem": 10, "body": 80, "norm": 0, "head": 10}


@dataclass
class Training:
    """A training of four modules, with an error of every gradient that only keeping ``needed`` in FP32 repairs."""

    error: float | tuple[float, ...] = 0.0
    """One for each batch, or the same for all."""
    needed: tuple[str, ...] = ("stem", "body", "head")
    noise: float = 1e-6
    rounding: float = 1e-3
    bf16: float = 0.05
    own: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What modules do differently when they run alone."""
    asked: list[str] = field(default_factory=list)

    def __call__(self, policy: Policy, settings: FallbackSettings, ahead: TrialsAhead) -> tuple[Measured, RunRecord]:
        self.asked.append(settings.name)
        steps = settings.steps if settings.all_steps else settings.steps[:1]
        local = [
            LocalError.model_validate(
                {"module": name, "type": "M", "flops": flops, **HEALTHY, **self.own.get(name, {})}
            )
            for name, flops in FLOPS.items()
        ]
        found = Measured(
            local=local if settings.role == "reference" else [],
            steps=[StepErrors(step=step, errors={"w": self._error(policy, settings, step)}) for step in steps],
        )
        return found, run_record("fp32")

    def _error(self, policy: Policy, settings: FallbackSettings, step: int) -> float:
        if settings.role != "check":
            return {"reference": 0.0, "noise": self.noise, "rounding": self.rounding}[settings.role]
        if settings.name == "instead":
            return self.bf16
        errors = self.error if isinstance(self.error, tuple) else (self.error,) * 3
        return 1e-3 if all(covered(name, policy.fp32_modules) for name in self.needed) else errors[step - 1]


def judged(training: Training, policy: str = "fp16", tolerance: float | None = None) -> FallbackRecord:
    return find(training, Policy.parse(policy), folder=".", tolerance=tolerance)


LOST = {"norm": {"output": 1.0}}
CASES: dict[str, tuple[Training, str, list[str], str]] = {
    # What FP16 does to healthy networks at their first step, measured: the digits CNN, a VGG, a ResNet.
    "digits: a hair above the tolerance": (Training(0.024, rounding=0.048), "not needed", [], ""),
    "a VGG: four tolerances": (Training(0.094, rounding=0.165), "not needed", [], ""),
    "a ResNet, whose ReLUs FP32's last bit switches": (Training(0.19, noise=0.013, rounding=0.36), "not needed", [], ""),
    "no module stands out": (Training(0.05, rounding=4e-3), "not needed", [], ""),
    "a hundred times what rounding does": (Training(0.05, rounding=5e-4, needed=("code outside",)), "elsewhere", [], ""),
    "half of the error of rounding, which amplifies": (Training(0.3, rounding=0.6), "not needed", [], ""),
    "beyond the limit, but rounding does it": (Training(0.7, rounding=0.8), "not needed", [], ""),
    # What needs FP32, and what it costs.
    "a layer that overflows": (Training(math.inf, needed=("norm",), own=LOST), "found", ["norm"], ""),
    "a layer that loses its gradient": (Training(1.0, needed=("norm",), own=LOST), "found", ["norm"], ""),
    "among ReLUs that switch": (Training(1.0, needed=("norm",), rounding=0.4, own=LOST), "found", ["norm"], ""),
    "a layer that amplifies rounding": (
        Training(0.7, needed=("norm",), rounding=0.8, own={"norm": {"rounded": 1.2}}), "found", ["norm"], ""
    ),
    "a lost gradient without a suspect": (Training(1.0, needed=("head",)), "found", ["head"], ""),
    "one that cannot run alone": (
        Training(0.05, needed=("head",), own={"head": {"reason": "RuntimeError"}}), "found", ["head"], ""
    ),
    "only a later batch": (Training((0.01, 0.01, 1.0), needed=("norm",), own=LOST), "found", ["norm"], ""),
    "most of the FLOPs": (Training(math.inf, needed=("body",), own={"body": {"output": 1.0}}), "does not pay", ["body"], "bf16"),
    "most of the FLOPs, and BF16 loses too": (
        Training(math.inf, needed=("body",), bf16=0.2, own={"body": {"output": 1.0}}), "does not pay", ["body"], "fp32"
    ),
    # What cannot be judged.
    "other data each time": (Training(1.2, noise=1.2, rounding=1.2), "not repeatable", [], ""),
    "rounding alone decides": (Training(1.1, noise=0.02, rounding=1.1), "undecided", [], ""),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_verdict(name: str) -> None:
    training, verdict, kept, instead = CASES[name]
    record = judged(training)
    assert (record.verdict, record.kept, record.instead) == (verdict, kept, instead), record.reason
    assert record.helps == (verdict == "found")


def test_before_and_after_are_of_the_same_batches() -> None:
    for error in ((0.4, 1.0, 0.3), (0.01, 1.0, 0.3)):
        record = judged(Training(error, needed=("norm",), own=LOST))
        assert (record.error_before, record.error_after) == (1.0, 1e-3)
        assert record.verifications[0].steps == record.verifications[-1].steps == record.steps == [1, 2, 3]


def test_a_healthy_training_takes_four_runs() -> None:
    training = Training(0.01)
    judged(training)
    assert training.asked == ["reference", "noise", "rounding", "kept-nothing-all-steps"]


def test_a_tolerance_that_was_given_decides_alone() -> None:
    training = Training(0.024, rounding=0.048, needed=("head",))
    record = judged(training, tolerance=0.02)
    assert (record.verdict, record.kept) == ("found", ["head"])
    assert [trial.allowed for trial in record.verifications] == [0.02] * len(record.verifications)


def test_a_policy_that_is_bf16_leaves_only_fp32() -> None:
    training = Training(math.inf, needed=("body",), own={"body": {"output": 1.0}})
    record = judged(training, "bf16")
    assert (record.verdict, record.instead) == ("does not pay", "fp32")
    assert "instead" not in training.asked


def test_the_share_counts_all_models() -> None:
    two = {name: {"module": name, "unnamed": True, "flops": flops} for name, flops in (("stem", 100), ("body", 300))}
    own = {**two, "head": {"output": 1.0, "flops": 200}}
    record = judged(Training(math.inf, needed=("head",), own=own))
    assert (record.verdict, record.fp32_share) == (
        "found",
        0.5,
    )  # of the 400 of two models, not of the 300 of the larger


@pytest.mark.parametrize(
    ("rounding", "most"), [(0.0, 0.02), (0.019, 0.02), (0.3, 0.3), (0.5, 0.5), (0.8, 0.5)]
)  # fmt: skip
def test_what_is_allowed(rounding: float, most: float) -> None:
    assert Allowed(tolerance=0.02, rounding={"w": rounding}).of("w") == most


def test_the_furthest_error_is_relative_to_what_is_allowed() -> None:
    allowed = Allowed(tolerance=0.02, rounding={"a": 0.4, "b": 0.01})
    steps = [StepErrors(step=1, errors={"a": 0.3, "b": 0.015}), StepErrors(step=2, errors={"a": 0.1, "b": 0.019})]
    assert allowed.furthest(steps) == (0.019, "b")
    assert allowed.furthest([]) == (math.inf, "")


STANDS_OUT: list[tuple[dict[str, Any], bool]] = [
    ({}, False),
    ({"output": 0.02}, False),
    ({"output": 0.021}, True),
    ({"wgrad": math.nan}, True),
    ({"rounded": 0.09}, False),  # rounding, amplified
    ({"rounded": 0.1}, True),
    ({"rounded": math.nan}, True),
    ({"reason": "RuntimeError"}, True),
]


@pytest.mark.parametrize(("own", "expected"), STANDS_OUT)
def test_a_module_that_stands_out(own: dict[str, Any], expected: bool) -> None:
    local = [LocalError.model_validate({"module": "a.b", "type": "M", **HEALTHY, **own})]
    assert stand_out(local, 0.02) == expected
    assert stand_out(local, 0.02, inside=["a"]) == expected
    assert not stand_out(local, 0.02, inside=["c"])
