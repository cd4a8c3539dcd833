"""The runs that a search requests next are predicted, whatever the outcome of the current run."""

from __future__ import annotations

from itertools import islice

import pytest

from mezzo.commands.fallback.find import find
from mezzo.commands.fallback.search import TrialsAhead, name_of
from mezzo.errors import ScriptError
from mezzo.observe.fallback.evidence import LocalError, Measured, StepErrors, checked
from mezzo.observe.module_names import covered
from mezzo.observe.settings import FallbackSettings
from mezzo.policy import Policy
from mezzo.records import RunRecord
from record_builders import run_record

MODULES = [f"layer{number}" for number in range(9)]
PARAMETERS = [f"{name}.weight" for name in MODULES]


def measured(steps: tuple[int, ...], error: float) -> Measured:
    return Measured(steps=[StepErrors(step=step, errors=dict.fromkeys(PARAMETERS, error)) for step in steps])


class Training:
    """A training whose gradients are right if the modules in ``needed`` stay in FP32; a later batch may need more."""

    def __init__(self, needed: set[str], later: set[str]) -> None:
        self._needed, self._later = needed, later
        self.asked: list[str] = []
        self.foreseen: list[list[str]] = []

    def __call__(self, policy: Policy, settings: FallbackSettings, ahead: TrialsAhead) -> tuple[Measured, RunRecord]:
        self.asked.append(settings.name)
        self.foreseen.append([trial.settings.name for trial in islice(ahead(), 2)])
        found = measured(settings.steps if settings.all_steps else settings.steps[:1], 0.0)
        if settings.role == "reference":
            local = [
                LocalError(module=name, type="Linear", output=1.0 / n, flops=1) for n, name in enumerate(MODULES, 1)
            ]
            found = found.model_copy(update={"local": local})
        needed = self._needed | (self._later if settings.all_steps else set())
        if settings.role == "check" and not all(covered(name, policy.fp32_modules) for name in needed):
            found = measured(settings.steps if settings.all_steps else settings.steps[:1], 0.7)
        return found, run_record("fp32")


@pytest.mark.parametrize(
    ("needed", "later", "kept"),
    [
        (set(), set(), []),
        ({"layer4"}, set(), ["layer4"]),
        ({"layer1", "layer7"}, set(), ["layer1", "layer7"]),
        ({"layer1"}, {"layer5"}, ["layer1", "layer5"]),
        ({"nowhere"}, set(), []),  # then operations are searched
    ],
)
def test_the_next_run_is_among_the_first_two_that_are_foreseen(
    needed: set[str], later: set[str], kept: list[str]
) -> None:
    training = Training(needed, later)
    found = find(training, Policy.parse("fp16"), folder=".")
    assert found.kept == kept
    assert training.asked[:4] == ["reference", "noise", "rounding", "kept-nothing-all-steps"]
    assert training.foreseen[:2] == [[], ["rounding", "kept-nothing-all-steps"]]
    for number, name in enumerate(training.asked[2:], start=1):
        assert name in training.foreseen[number]


def test_looking_ahead_changes_nothing() -> None:
    class Blind(Training):
        def __call__(
            self, policy: Policy, settings: FallbackSettings, ahead: TrialsAhead
        ) -> tuple[Measured, RunRecord]:
            return super().__call__(policy, settings, lambda: ())

    both = [kind({"layer1", "layer7"}, {"layer5"}) for kind in (Training, Blind)]
    records = [find(training, Policy.parse("fp16"), folder=".") for training in both]
    assert both[0].asked == both[1].asked
    assert records[0] == records[1]


def test_a_run_is_named_by_what_it_keeps() -> None:
    assert name_of((), (), all_steps=False) == "kept-nothing"
    assert name_of(("4.last", "norm"), (), all_steps=True) == "kept-4.last+norm-all-steps"
    assert name_of((), ("mul", "add"), all_steps=False) == "operations-mul+add"
    long = name_of(tuple(f"encoder.layer.{n}.attention/x" for n in range(30)), (), all_steps=False)
    assert long.startswith("kept-30-")
    assert len(long) == 16
    assert "/" not in name_of(("a/b",), (), all_steps=False)


@pytest.mark.parametrize(
    ("error", "goes_on"),
    [
        ("RuntimeError: value cannot be converted to type c10::Half without overflow", True),
        ("""NotImplementedError: "svd_cpu" not implemented for 'Half'""", True),
        ("KeyError: 'x'", False),
    ],
)
def test_a_trial_that_fails_by_the_format_is_evidence(error: str, goes_on: bool) -> None:
    run = run_record(num_steps=0, error=error, exit_code=1)
    if goes_on:
        assert checked(Measured(), run, where="a.log", role="check") == Measured()
    for role in ["reference", "noise"] if goes_on else ["reference", "noise", "check"]:
        with pytest.raises(ScriptError):
            checked(Measured(), run, where="a.log", role=role)


def test_a_run_that_was_refused_says_what_to_do_instead() -> None:
    run = run_record(num_steps=0, error="mezzo fallback inspects torch alone", hint="KERAS_BACKEND=torch works")
    with pytest.raises(
        ScriptError, match="made no training step that could be compared: mezzo fallback inspects torch"
    ) as shown:
        checked(Measured(), run, where="what it printed is in a.log", role="reference")
    assert shown.value.hint == "KERAS_BACKEND=torch works"
    with pytest.raises(ScriptError) as shown:
        checked(Measured(), run_record(error="no"), where="it is in a.log", role="reference")
    assert shown.value.hint == "run it by itself first; it is in a.log"
