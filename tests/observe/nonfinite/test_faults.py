"""What a run's steps are judged to be, step by step, without a framework."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from helpers_values import existing
from mezzo.observe.nonfinite.evidence import FaultSource, GradientErrors, Harmless, SourceKind, WrongGradient
from mezzo.observe.nonfinite.faults import ClosedStep, Faults, InspectedStep, SkipRule
from mezzo.records import RunRecord, Steps
from record_builders import environment

DYNAMIC, STATIC = SkipRule(dynamic=True, growth_interval=10), SkipRule(dynamic=False)


class Named:
    """Names that are what they name."""

    def of(self, module: Any) -> str:
        return str(module)

    def pattern(self, module: Any) -> str:
        return str(module)

    def parameter(self, parameter: Any) -> str:
        return str(parameter)


class Told(NamedTuple):
    """A training with known answers."""

    rule: SkipRule = DYNAMIC
    scale: float = 65536.0
    norm: float = 1.0

    def names(self) -> Named:
        return Named()

    def skip_rule(self) -> SkipRule:
        return self.rule

    def loss_scale(self) -> float:
        return self.scale

    def largest_norm(self) -> float:
        return self.norm


def source(
    kind: SourceKind = "made", *, index: int = 3, wide: float | None = 1e5, scale: float = 1.0, **known: Any
) -> FaultSource:
    whole: dict[str, Any] = {
        "op": f"{kind}{index}",
        "module": "fc",
        "line": f"train.py:{index}",
        "backward": False,
        "format": "fp16",
    }
    return FaultSource(index, kind, operands=[], wide=wide, scale=scale, **(whole | known))


def showed(
    *sources: FaultSource,
    of_loss: tuple[FaultSource, ...] = (),
    in_backward: tuple[FaultSource, ...] = (),
    **known: Any,
) -> InspectedStep:
    return InspectedStep(
        sources=list(sources),
        of_loss=list(of_loss),
        in_backward=list(in_backward),
        gradient_errors=known.get("errors"),
        harmless=known.get("harmless", []),
    )


def errors(
    *, above: tuple[FaultSource, ...] = (), below: tuple[FaultSource, ...] = (), norm: float = 1.0
) -> GradientErrors:
    def wrong(sources: tuple[FaultSource, ...]) -> tuple[WrongGradient, ...]:
        return tuple(WrongGradient(f"w{k}", 0.1 * (k + 1), (one,)) for k, one in enumerate(sources))

    return GradientErrors(wrong(above), wrong(below), 4, 0.5, norm)


def steps_of(pattern: str) -> list[ClosedStep]:
    """Return steps: ``.`` healthy, ``x`` skipped, ``l`` with an infinite loss, ``g`` with infinite gradients that were used."""
    return [ClosedStep(n, mark != "l", mark not in "xg", mark == "x", None) for n, mark in enumerate(pattern, 1)]


def run_of(steps: list[ClosedStep], error: str | None = None, *, scale: float = 1024.0) -> RunRecord:
    count = len(steps)
    recorded = Steps(
        loss=[0.5] * count,
        loss_scale=[scale] * count,
        grad_norm=[1.0] * count,
        skipped=[step.skipped for step in steps],
    )
    return RunRecord(
        command=["mezzo"],
        script="train.py",
        script_sha256="",
        policy="fp16",
        environment=environment(),
        steps=recorded,
        error=error,
    )


PATTERNS: list[tuple[str, Told, bool, list[int], list[int], int | None]] = [
    # the steps; the training; whether that is enough; the bad and the faulty steps, and that of a lost loss
    ("....", Told(), False, [], [], None),
    ("xx..", Told(), False, [1, 2], [], None),  # the search for a scale
    ("xx..", Told(rule=STATIC), True, [1, 2], [1, 2], None),
    ("xx", Told(), False, [1, 2], [1, 2], None),  # never made
    ("xx", Told(scale=0.5), True, [1, 2], [1, 2], None),  # and no scale would cure it
    (".x...x", Told(), False, [2, 6], [2, 6], None),
    ("..l", Told(), True, [3], [3], 3),
    (".g.l", Told(), True, [2, 4], [2, 4], 4),
]


@pytest.mark.parametrize(("pattern", "training", "enough", "bad", "faulty", "lost"), PATTERNS)
def test_steps_that_were_not_inspected(
    pattern: str, training: Told, enough: bool, bad: list[int], faulty: list[int], lost: int | None
) -> None:
    faults, steps = Faults(training, ()), steps_of(pattern)
    assert [faults.close(step) for step in steps] == [False] * len(steps)
    evidence = faults.evidence(run_of(steps), watched=[1], unfinished=None)
    assert faults.are_enough is enough
    assert (evidence.bad_steps, evidence.faulty_steps, evidence.lost_step) == (bad, faulty, lost)
    assert (evidence.located, evidence.watched) == (None, [1])


@pytest.mark.parametrize(
    ("pattern", "rule", "scale", "faulty"),
    [
        ("xx..", SkipRule(dynamic=True), 64.0, [1, 2]),  # for good: the scale at the end is as low
        ("xx..", SkipRule(dynamic=True), 128.0, []),
        ("....", SkipRule(dynamic=True), 64.0, []),  # the script began there
    ],
)
def test_skips_that_lower_the_scale_for_good_are_faults(
    pattern: str, rule: SkipRule, scale: float, faulty: list[int]
) -> None:
    faults, steps = Faults(Told(rule=rule), ()), steps_of(pattern)
    for step in steps:
        faults.close(step)
    evidence = faults.evidence(run_of(steps, scale=scale), watched=[1], unfinished=None)
    assert evidence.faulty_steps == faulty
    assert evidence.settled_scale == (scale if faulty else None)


@pytest.mark.parametrize(
    ("exponents", "settled", "may_be_higher"),
    [
        ([9, 8, 7, 6, 6, 6, 6, 6], 64.0, True),
        ([9, 8, 7, 6, 5, 5, 5, 5], 32.0, False),  # two doublings below the limit is low in a run of any length
        ([9, 8, 8, 8, 8, 8, 7, 6], None, False),  # down to 2^6 in the last step, as a scale around 2^8 is now and then
        ([9, 8, 7, 6, 6, 6, 7, 7], 64.0, True),  # it grew once: it was at 2^6 before
        ([9, 8, 7, 7, 7, 7, 7, 7], None, False),
        ([9, 8, 7, *[6] * 196], 64.0, True),
        ([9, 8, 7, *[6] * 197], 64.0, False),  # 200 steps decide
        ([9, 8, 7, *[6] * 167, *[7] * 30], 64.0, False),
        ([9, 8, 7, *[6] * 166, *[7] * 31], None, False),  # of 200 steps, seven tenths of the second half are below 2^7
    ],
)
def test_a_scale_settles_where_most_of_the_later_steps_are(
    exponents: list[int], settled: float | None, may_be_higher: bool
) -> None:
    skipped = [now < then for now, then in zip(exponents, [10, *exponents], strict=False)]
    steps = steps_of("".join("x" if skip else "." for skip in skipped))
    run = run_of(steps).model_copy(
        update={"steps": Steps(loss=[1.0] * len(exponents), skipped=skipped, loss_scale=[2.0**e for e in exponents])}
    )
    evidence = Faults(Told(), ()).evidence(run, watched=[1], unfinished=None)
    assert (evidence.settled_scale, evidence.may_settle_higher) == (settled, may_be_higher)


MADE, BACKWARD = source(), source(index=7, backward=True, scale=1024.0)
ROOT = source(index=9, wide=None, backward=True, scale=1024.0)
CONSTANT, ENTERED = source("constant", index=1), source("entered", index=2, wide=None)
VANISHED = source("vanished", index=4, share=0.5)
LIGHT = source("vanished", index=2, share=0.01)
CAUSED = source(index=9, wide=None, because=(MADE,))
ZERO_DIVISOR = source(index=8, wide=None, because=(VANISHED,))
BLAMED: list[tuple[InspectedStep, str, str | None, dict[str, Any]]] = [
    # what a step showed; how it ended (as above); the operation to blame; what else is known of it
    (showed(MADE), ".", None, {}),
    (showed(MADE, of_loss=(MADE,)), "l", "made3", {"arrived": False}),
    (showed(CONSTANT, MADE, of_loss=(CONSTANT, MADE)), "l", "made3", {}),  # a mask of infinities comes after all others
    (showed(CONSTANT, of_loss=(CONSTANT,)), "l", "constant1", {}),
    (showed(MADE, BACKWARD, in_backward=(BACKWARD,)), "l", "made7", {}),  # nothing known of the loss
    (showed(MADE, of_loss=(MADE,)), "g", None, {}),  # its loss was finite
    (showed(ENTERED, in_backward=(ENTERED,)), "g", "entered2", {"arrived": True}),
    (showed(CAUSED, of_loss=(CAUSED,)), "l", "made3", {"symptom": "made9"}),
    (showed(ZERO_DIVISOR, of_loss=(ZERO_DIVISOR,)), "l", "made8", {"vanished": "vanished4"}),
    (showed(MADE, errors=errors(above=(MADE,))), ".", "made3", {"gradient": "w0", "zeros": 0.0}),
    (showed(MADE, BACKWARD, errors=errors(above=(BACKWARD, MADE))), ".", "made3", {"gradient": "w1"}),
    (showed(VANISHED, errors=errors(below=(VANISHED,))), ".", "vanished4", {"gradient": "w0", "zeros": 0.5}),
    (showed(LIGHT, VANISHED, errors=errors(below=(LIGHT, VANISHED))), ".", "vanished4", {}),  # the first of any weight
    (showed(LIGHT, errors=errors(below=(LIGHT,))), ".", "vanished2", {}),
    (showed(VANISHED, errors=errors(below=(VANISHED,), norm=2.0**-11)), ".", None, {}),  # the training has converged
    # an overflow that only the loss scale causes hides one of the forward pass
    (showed(MADE, BACKWARD, in_backward=(BACKWARD,), errors=errors(above=(MADE,))), "g", "made3", {"gradient": "w0"}),
    (showed(BACKWARD, in_backward=(BACKWARD,), errors=errors(above=(BACKWARD,))), "g", "made7", {"gradient": None}),
    # what no scale cures comes before an overflow of the scale, which it follows
    (showed(BACKWARD, ROOT, in_backward=(BACKWARD, ROOT)), "g", "made9", {}),
]


@pytest.mark.parametrize(("inspected", "mark", "op", "known"), BLAMED)
def test_the_place_to_blame(inspected: InspectedStep, mark: str, op: str | None, known: dict[str, Any]) -> None:
    faults = Faults(Told(), ())
    (step,) = steps_of(mark)
    faults.close(step._replace(inspected=inspected))
    found = faults.first()
    assert (None if found is None else found.source.op) == op
    if found is None:
        return
    shown = {
        "arrived": found.arrived,
        "symptom": None if found.symptom is None else found.symptom.op,
        "vanished": None if found.vanished is None else found.vanished.op,
        "gradient": None if found.gradients is None else found.gradients.parameter,
        "zeros": None if found.gradients is None else found.gradients.zeros,
    }
    assert {name: shown[name] for name in known} == known
    assert faults.are_enough


def test_an_overflow_that_the_scale_skipped_is_a_fault_only_if_the_skip_is() -> None:
    inspected = showed(BACKWARD, in_backward=(BACKWARD,))
    for pattern, expected in [("x.........", None), (".x...x....", 2)]:
        faults, steps = Faults(Told(), ()), steps_of(pattern)
        for step in steps:
            faults.close(step._replace(inspected=inspected if step.skipped else None))
        found = faults.first()
        assert (None if found is None else found.step) == expected, pattern
        assert not faults.are_enough


@pytest.mark.parametrize(
    ("pattern", "suspects", "inspect_all", "enough"),
    [
        ("..g.", (3,), [False] * 4, True),
        ("....", (3,), [False, False, True, False], False),  # the script does not repeat the same steps
        ("x.x.", (1, 3), [False] * 4, True),
        ("x...", (1, 3), [False, False, True, False], False),
        ("....", (), [False] * 4, False),
    ],
)
def test_suspects(pattern: str, suspects: tuple[int, ...], inspect_all: list[bool], enough: bool) -> None:
    faults = Faults(Told(), suspects)
    assert [faults.close(step) for step in steps_of(pattern)] == inspect_all
    assert faults.are_enough is enough


def test_harmless_values_count_once_a_line_and_only_in_healthy_steps() -> None:
    values = [
        Harmless(op="masked_fill", line=f"m.py:{n}", format="fp16", largest=1e9, absorbed_by=["softmax"])
        for n in (1, 1, 2)
    ]
    faults = Faults(Told(), ())
    for step, value in zip(steps_of("..x"), values, strict=True):
        faults.close(step._replace(inspected=showed(harmless=[value])))
    assert faults.evidence(run_of(steps_of("..x")), watched=[], unfinished=None).harmless == values[:1]


@pytest.mark.parametrize(
    ("error", "pattern", "op", "watched"),
    [
        ("RuntimeError: overflow", "..", "made3", [1, 3]),
        (None, "..", None, [1]),  # the script ended by itself
        ("RuntimeError: overflow", ".l", None, [1]),  # a step that ended explains it
    ],
)
def test_a_step_that_never_ended(error: str | None, pattern: str, op: str | None, watched: list[int]) -> None:
    faults, steps = Faults(Told(), ()), steps_of(pattern)
    for step in steps:
        faults.close(step)
    unfinished = showed(MADE, of_loss=(MADE,))
    evidence = faults.evidence(run_of(steps, error=error), watched=[1], unfinished=unfinished)
    assert (None if evidence.located is None else evidence.located.source.op) == op
    assert evidence.watched == watched


def test_a_number_that_torch_refuses_is_to_blame_only_if_the_step_never_ended() -> None:
    refused = source("refused", index=5)
    inspected = showed(MADE, refused, of_loss=(MADE,))
    faults = Faults(Told(), ())
    faults.close(steps_of("l")[0]._replace(inspected=inspected))
    first = existing(faults.first())
    assert first.source.op == "made3"
    evidence = Faults(Told(), ()).evidence(run_of([], error="no"), watched=[], unfinished=inspected)
    assert evidence.located is not None
    assert evidence.located.source.op == "refused5"
