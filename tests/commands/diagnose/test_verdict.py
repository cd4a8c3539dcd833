"""Evidence in, verdict out: every verdict of one run and what each further run changes, without running a script."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzo.commands.diagnose.fixes import Tried, next_offer, settled
from mezzo.commands.diagnose.offers import Offer
from mezzo.commands.diagnose.record import Origin
from mezzo.commands.diagnose.verdict import Role, ScriptRun, diagnosis, known, tried, verdict_on
from mezzo.formats import FORMATS
from mezzo.observe.nonfinite.evidence import (
    Evidence,
    Harmless,
    Located,
    LostValues,
    WrongGradients,
    read_evidence,
    write_evidence,
)
from mezzo.observe.settings import DiagnoseSettings, TrialChanges
from mezzo.policy import Policy
from mezzo.records import AS_IS, DiagnoseRecord, Operand, RunRecord, StepPhase, Steps
from mezzo.report.pages import page_of
from record_builders import environment

RANGE, SCALE, INVALID, SILENT = "range_overflow", "scale_overflow", "invalid_operation", "silent_saturation"
UNDECIDED = "undecided"
FP16_MAX = 65504.0
OPERAND = Operand(format="fp16", shape=[2, 2], largest=300.0, smallest=0.0)
WRONG = WrongGradients(parameter="0.weight", error=0.5, count=1, total=2)


def values(**changed: Any) -> LostValues:
    """Return an overflow of a forward pass in FP16."""
    usual: dict[str, Any] = {
        "kind": "made",
        "op": "mul",
        "module": "1",
        "pattern": "1",
        "line": "train.py:3",
        "format": "fp16",
        "largest": 1e5,
        "operands": [OPERAND],
    }
    return LostValues(**usual | changed)


def at(step: int = 1, **changed: Any) -> Located:
    """Return a place by what is unusual about its values."""
    outer = {name: changed.pop(name) for name in ("vanished", "symptom", "gradients") if name in changed}
    return Located(step=step, source=values(**changed), **outer)


def record_of(num_steps: int = 4, policy: str = "fp16", **changed: Any) -> RunRecord:
    steps = Steps(
        loss=[0.5] * num_steps,
        loss_scale=[4.0] * num_steps,
        skipped=[k + 1 in changed.get("skipped", ()) for k in range(num_steps)],
        grad_norm=[1.0] * num_steps,
    )
    ending = {name: changed[name] for name in ("error", "exit_code") if name in changed}
    return RunRecord(
        command=["mezzo"],
        script="train.py",
        script_sha256="",
        policy=policy,
        environment=environment(),
        steps=steps,
        **ending,
    )


def ran(role: Role, evidence: Evidence | None, *steps: int, run: RunRecord | None = None, **more: Any) -> ScriptRun:
    """Return a run of a script with settings for certain steps."""
    policy = more.pop("policy", "fp32" if role == "fp32" else "fp16")
    asked = DiagnoseSettings(steps=steps or (1,), suspects=steps if role == "suspects" else ())
    run = record_of(policy=str(policy)) if run is None else run
    parsed = None if policy == AS_IS else Policy.of(policy)
    return ScriptRun(role=role, reason="", policy=parsed, settings=asked, run=run, evidence=evidence, **more)


# --- one place: what it is -------------------------------------------------------------------------------------------------------

BACKWARD = {"backward": True, "loss_scale": 1024.0}
PLACES: list[tuple[Located, str]] = [
    (at(), RANGE),
    (at(loss_scale=1024.0), RANGE),  # a forward pass knows no loss scale
    (at(**BACKWARD), SCALE),
    (at(**BACKWARD, largest=FP16_MAX * 1024), SCALE),  # fits at a scale of 1, just so
    (at(**BACKWARD, largest=65536.0 * 1024), RANGE),
    (at(backward=True), RANGE),  # there is no scale to lower
    (at(backward=True, loss_scale=0.5), RANGE),
    (at(**BACKWARD, format="bf16", largest=FORMATS["bf16"].max * 1024), SCALE),
    (at(largest=None), INVALID),
    (at(**BACKWARD, largest=None), INVALID),
    (at(largest=math.inf), INVALID),
    (at(largest=math.nan), INVALID),
    (at(kind="entered", largest=None), INVALID),
    (at(kind="entered", largest=5.0), INVALID),
    (at(kind="constant", largest=None), INVALID),
    (at(kind="refused", largest=1e9), RANGE),
    (at(largest=None, vanished=values(kind="vanished", largest=1e-9)), RANGE),
    (at(**BACKWARD, largest=None, vanished=values(kind="vanished", largest=1e-9)), RANGE),
    (at(symptom=values(op="log", largest=None)), RANGE),
    (at(**BACKWARD, symptom=values(op="log", largest=None)), RANGE),  # another scale would move it, not mend it
    (at(largest=None, symptom=values(op="log", largest=None)), INVALID),
    (at(gradients=WRONG), SILENT),
    (at(**BACKWARD, gradients=WRONG), SILENT),
    (at(kind="vanished", largest=1e-9, gradients=WRONG), SILENT),
]


@pytest.mark.parametrize(("located", "verdict"), PLACES)
def test_a_place_is_judged_by_its_values_in_fp32(located: Located, verdict: str) -> None:
    assert verdict_on(located) == verdict


SENTENCES: list[tuple[Located, str]] = [
    (at(), "mul() reaches 1e+05; FP16 ends at 65504"),
    (
        at(**BACKWARD),
        "the backward pass of mul() reaches 1e+05; FP16 ends at 65504. Without the loss scale of 1024 it would be 97.7",
    ),
    (
        at(largest=None),
        "mul() has no finite result in FP32 either; it read magnitudes of 0 to 300 in fp16",
    ),
    (
        at(backward=True, largest=math.inf, operands=[OPERAND, OPERAND.model_copy(update={"num_not_finite": 2})]),
        "the backward pass of mul() has no finite result in FP32 either; it read magnitudes of 0 to 300 in fp16; "
        "0 to 300 and 2 that are not finite in fp16",
    ),
    (
        at(gradients=WRONG),
        "mul() reaches 1e+05; FP16 ends at 65504. what reads it turns the infinity into finite but wrong numbers. "
        "1 of 2 gradients are wrong; 0.weight's is off by 50% of its norm",
    ),
    (
        at(kind="entered", operands=[OPERAND.model_copy(update={"num_not_finite": 3})]),
        "mul() read an input that already had 3 values that are not finite",
    ),
    (
        at(kind="entered", parameter=True, operands=[OPERAND.model_copy(update={"num_not_finite": 1})]),
        "mul() read a weight that already had 1 value that is not finite",
    ),
    (
        at(kind="refused", largest=1e9),
        "mul() is given 1e+09; FP16 ends at 65504, and torch raises an error",
    ),
    (
        at(largest=None, vanished=values(kind="vanished", op="add", largest=1e-9)),
        "mul() has no finite result; it read magnitudes of 0 to 300 in fp16. add() turns values up to 1e-09 into 0, "
        "because FP16's smallest number is 6e-08; FP32 keeps them",
    ),
    (
        at(symptom=values(op="log")),
        "mul() reaches 1e+05; FP16 ends at 65504. Its wrong values then reach log(), which has no finite result for them",
    ),
    (
        at(gradients=WRONG, swallowed_by=["div", "exp"]),
        "mul() reaches 1e+05; FP16 ends at 65504. div() and exp() turn the infinity into finite but wrong numbers. "
        "1 of 2 gradients are wrong; 0.weight's is off by 50% of its norm",
    ),
    (
        at(kind="vanished", largest=1e-9, gradients=WRONG.model_copy(update={"zeros": 0.25})),
        "mul() turns values up to 1e-09 into 0, because FP16's smallest number is 6e-08. "
        "25% of all gradient elements are 0 for this reason alone. 1 of 2 gradients are wrong; 0.weight's is off by 50% of its norm",
    ),
]


@pytest.mark.parametrize(("located", "sentence"), SENTENCES)
def test_a_place_is_told_in_a_sentence(located: Located, sentence: str) -> None:
    assert diagnosis([ran("first", Evidence(located=located))]).detail == sentence


def test_the_record_has_the_place_and_what_is_wrong() -> None:
    located = at(3, gradients=WRONG, swallowed_by=["div"], loss_scale=8.0)
    record = diagnosis([ran("first", Evidence(located=located, watched=[1, 3], own_scaler=True))], untried="no time")
    assert (record.module, record.pattern, record.op, record.line) == ("1", "1", "mul", "train.py:3")
    assert (record.located, record.origin, record.phase, record.step) == (True, "made", "forward", 3)
    assert (record.format, record.largest, record.loss_scale, record.own_scaler) == ("fp16", 1e5, 8.0, True)
    assert (record.gradient, record.gradient_error, record.swallowed_by) == ("0.weight", 0.5, "div")
    assert (record.fix_line, record.fix_note) == ('policy = "fp16:fp32_modules=1"', "not tried: no time")
    assert [t.step for t in record.trend] == [1, 2, 3]
    assert record.passes[0].watched == [1, 3]


def test_only_what_a_gradient_shows_is_called_swallowed() -> None:
    located = at(backward=True, swallowed_by=["div"])
    record = diagnosis([ran("first", Evidence(located=located))])
    assert (record.phase, record.swallowed_by, record.gradient, record.gradient_error) == ("backward", "", "", None)


def test_what_vanished_before_gives_the_record_its_format() -> None:
    lost = values(kind="vanished", largest=1e-9, format="fp16")
    record = diagnosis([ran("first", Evidence(located=at(largest=None, format="fp32", vanished=lost)))])
    assert (record.origin, record.format) == ("vanished", "fp16")


# --- one run ---------------------------------------------------------------------------------------------------------------------

NO_KERNEL = "RuntimeError: scatter(): Expected self.dtype to be equal to src.dtype"
FAULTY = {"bad_steps": [2, 3], "faulty_steps": [2, 3]}
RUNS: list[tuple[Evidence, RunRecord, tuple[str, str, int]]] = [
    # what it showed, how it ended, verdict, phase and step
    (Evidence(), record_of(), ("healthy", "", 0)),
    (Evidence(bad_steps=[1]), record_of(skipped=[1]), ("healthy", "", 0)),
    (Evidence(), record_of(0), ("unfinished", "", 0)),
    (Evidence(), record_of(exit_code=3), ("unfinished", "", 0)),
    (Evidence(), record_of(exit_code=1, error="KeyError: 1"), ("unfinished", "", 0)),
    (Evidence(**FAULTY, scaled=True), record_of(), (UNDECIDED, "backward", 2)),
    (Evidence(**FAULTY), record_of(), (UNDECIDED, "backward", 2)),
    (Evidence(**FAULTY, watched=[2]), record_of(), (INVALID, "backward", 2)),
    (Evidence(**FAULTY, scaled=True, lost_step=3), record_of(), (UNDECIDED, "forward", 3)),
    (Evidence(**FAULTY, lost_step=3), record_of(exit_code=1, error="E"), (UNDECIDED, "forward", 3)),
    (Evidence(**FAULTY, located=at(2, in_update=True)), record_of(), (RANGE, "update", 2)),
    (Evidence(**FAULTY, located=at(2)), record_of(), (RANGE, "forward", 2)),
    (Evidence(located=at(1)), record_of(0, exit_code=1, error="E"), (RANGE, "forward", 1)),
    (Evidence(located=at(1)), record_of(0, exit_code=1, error=NO_KERNEL), ("unfinished", "", 0)),
    (Evidence(located=at(5)), record_of(4, exit_code=1, error=NO_KERNEL), ("unfinished", "", 0)),
    (Evidence(located=at(2)), record_of(4, exit_code=1, error=NO_KERNEL), (RANGE, "forward", 2)),
]


@pytest.mark.parametrize(
    ("phase", "origin", "scales"),
    [
        ("forward", "made", "at any loss scale"),
        ("forward", "vanished", "at any loss scale"),
        ("backward", "made", "at a loss scale of 1 or more"),
        ("backward", "vanished", "at any loss scale"),
    ],
)
def test_only_gradients_depend_on_the_loss_scale(phase: StepPhase, origin: Origin, scales: str) -> None:
    record = DiagnoseRecord(
        run=record_of(), verdict="range_overflow", phase=phase, origin=origin, format="fp16", located=True, step=1
    )
    assert page_of(record).answer.detail == f"a value that FP16 cannot represent, {scales}"


@pytest.mark.parametrize(("evidence", "run", "expected"), RUNS)
def test_one_run_is_judged(evidence: Evidence, run: RunRecord, expected: tuple[str, str, int]) -> None:
    record = known([ran("first", evidence, run=run)])
    assert (record.verdict, record.phase, record.step) == expected
    assert record.located == (evidence.located is not None and expected[0] != "unfinished")
    assert (record.bad_steps, record.faulty_steps) == (evidence.bad_steps, evidence.faulty_steps)


@pytest.mark.parametrize(
    ("changed", "diverges"),
    [
        ({}, True),
        ({"watched": [1, 3]}, False),
        ({"scaled": True}, False),
        ({"lost_step": 2}, False),
        ({"problems": {"tanh": "Error"}}, False),
    ],
)
def test_a_step_whose_operations_are_all_finite_has_an_infinite_norm(changed: dict[str, Any], diverges: bool) -> None:
    evidence = Evidence(**FAULTY, watched=[2]).model_copy(update=changed)
    alone = diagnosis([ran("first", evidence)])
    assert ("their norm is beyond FP32's range" in alone.detail) == diverges
    assert (alone.fix == "lower the learning rate, or clip the gradients") == diverges
    again = diagnosis([ran("first", UNSEEN), ran("suspects", evidence, 2)])
    assert ("their norm is beyond FP32's range" in again.detail) == diverges


def test_notes_say_what_was_seen_beside_the_fault() -> None:
    seen: dict[str, Any] = {"problems": {"tanh": "Error: strange"}, "forced_eager": True, "found_by_rank": 1}
    one = Harmless(op="mul", line="/a/train.py:3", format="fp16", largest=1e9, absorbed_by=["softmax"])
    with_fault = diagnosis([ran("first", Evidence(**seen, located=at(), harmless=[one]))])
    assert [(n.what, n.value) for n in with_fault.notes] == [
        ("not inspected", "tanh()"),
        ("torch.compile", "inspected steps ran eagerly"),
        ("found by", "the process of rank 1"),
        ("undecided", "perhaps range overflow"),
    ]
    assert with_fault.forced_eager
    other = Harmless(op="pow", line="t.py:4", format="fp16", largest=1e5, absorbed_by=[], swallowed_by=["reciprocal"])
    healthy = diagnosis([ran("first", Evidence(harmless=[one, other]))])
    assert [(n.what, n.value, n.reason) for n in healthy.notes] == [
        (
            "harmless",
            "mul() in train.py:3",
            "1e+09 is infinite in FP16; softmax() returns the same for both, and no gradient changes",
        ),
        (
            "harmless",
            "pow() in t.py:4",
            "1e+05 is infinite in FP16; reciprocal() makes other finite numbers of it, and no gradient changes by more than rounding",
        ),
    ]


ENDINGS: list[tuple[RunRecord, str]] = [
    (record_of(0, exit_code=3), "the script ended before its first training step, with exit code 3"),
    (
        record_of(1, exit_code=1, error="KeyError: 'a'\nmore"),
        "the script ended after 1 training step, with exit code 1: KeyError: 'a'. No fault was found up to then",
    ),
    (
        record_of(2, exit_code=130, error="KeyboardInterrupt"),
        "the script was interrupted after 2 training steps, with exit code 130. No fault was found up to then",
    ),
]


@pytest.mark.parametrize(("run", "sentence"), ENDINGS)
def test_a_run_without_a_verdict_says_how_it_ended(run: RunRecord, sentence: str) -> None:
    record = diagnosis([ran("first", Evidence(), run=run)])
    assert (record.verdict, record.detail, record.passes[0].outcome) == ("unfinished", sentence, sentence)


@pytest.mark.parametrize(
    ("located", "faulty", "skipped", "said"),
    [
        (at(1, **BACKWARD), [1, 2, 3, 4], [1, 2, 3, 4], "All 4 updates were skipped, and the scale is down to 4"),
        (at(3, **BACKWARD), [3, 4], [1, 3, 4], "3 of 4 updates were skipped, 2 of them after the loss scale had been"),
        (at(3), [3, 4], [3, 4], "2 of 4 updates were skipped, all after the loss scale had been found: steps 3, 4"),
        (at(1, **BACKWARD), [1], [1, 3], "2 of 4 updates were skipped, 1 of them by an optimizer that never made an"),
        (at(3), [3], [3], ""),  # one overflow of a value, and not of the scale
        (at(3, largest=None), [3, 4], [3, 4], ""),
    ],
)
def test_lost_updates_are_counted_where_the_scale_is_to_blame(
    located: Located, faulty: list[int], skipped: list[int], said: str
) -> None:
    evidence = Evidence(located=located, bad_steps=faulty, faulty_steps=faulty, scaled=True)
    run = record_of(skipped=skipped)
    detail = diagnosis([ran("first", evidence, run=run)]).detail
    assert ("updates were skipped" in detail) == bool(said)
    assert said in detail


@pytest.mark.parametrize("short", [True, False])
def test_a_low_scale_of_a_short_run_is_undecided_until_there_are_enough_steps(short: bool) -> None:
    evidence = SCALED.model_copy(update={"settled_scale": 64.0, "may_settle_higher": short})
    run = record_of(skipped=[3]).model_copy(update={"command": ["mezzo", "diagnose", "train.py"], "script": "train.py"})
    record = diagnosis([ran("first", evidence, run=run), ran("scale of 1", FINITE, 3)])
    assert record.verdict == ("undecided" if short else "scale_overflow")
    assert (record.perhaps, record.steps_needed) == (("scale_overflow", 200) if short else ("", None))
    assert bool(record.fix_line) is not short  # no fix is tried against what may not be a fault
    steps = [step.command for step in page_of(record).steps]
    assert ("mezzo diagnose --policy fp16 --steps 200 train.py" in steps) is short
    assert ("200 steps or more" in record.fix) is short


@pytest.mark.parametrize(
    ("located", "untried"),
    [
        (at(), ""),
        (
            at(kind="refused", largest=1e9),
            "; writing torch.finfo(x.dtype).min or max in place of the number in the script was not tried",
        ),
        (
            at(largest=None, vanished=values(kind="vanished", largest=1e-9)),
            "; keeping the value that becomes 0 above 6e-08 in the script was not tried",
        ),
        (at(kind="vanished", largest=1e-9, gradients=WRONG), ""),
    ],
)
def test_a_fix_that_helped_says_what_else_may_help_in_the_script(located: Located, untried: str) -> None:
    record = known([ran("first", Evidence(located=located))])
    healthy = DiagnoseRecord(run=record_of(), verdict="healthy")
    fixed = settled(
        record, [Tried(Offer("train in BF16", policy=Policy.parse("bf16")), healthy)], last=4, caller="loop"
    )
    assert (fixed.fix, fixed.fix_tried) == ("train in BF16", True)
    assert fixed.fix_note == f"tried: the script ran 4 steps under bf16, and nothing is wrong{untried}"


# --- further runs ----------------------------------------------------------------------------------------------------------------

SCALED = Evidence(located=at(3, **BACKWARD), watched=[3], bad_steps=[3], faulty_steps=[3], scaled=True)
BROKEN = Evidence(located=at(3, largest=None), watched=[3], bad_steps=[3], faulty_steps=[3])
OVERFLOWS = Evidence(located=at(3), watched=[3], bad_steps=[3], faulty_steps=[3])
UNSEEN = Evidence(bad_steps=[3], faulty_steps=[3], scaled=True)
BROKEN_IN_FP32 = BROKEN.model_copy(update={"narrow": False})
UNSEEN_IN_FP32 = UNSEEN.model_copy(update={"narrow": False})
FINITE = Evidence(watched=[3])
SILENT_AT_ONE = Evidence(watched=[3], located=at(3, module="2", gradients=WRONG))
ZERO_AT_ONE = Evidence(watched=[3], located=at(3, kind="vanished", largest=1e-9, gradients=WRONG))
INFINITE_AT_ONE = BROKEN.model_copy(
    update={"located": at(3, largest=None, vanished=values(kind="vanished", largest=1e-9))}
)


def wide(evidence: Evidence) -> ScriptRun:
    """Return a run in FP32 in which the script's own 16-bit formats are FP32 too."""
    one = ran("fp32", evidence, 3)
    return replace(one, settings=DiagnoseSettings(steps=(3,), changes=TrialChanges(own_format="fp32")))


FURTHER: list[tuple[str, list[ScriptRun], tuple[str, str], list[str]]] = [
    # the case, the runs, verdict and module, outcomes of the runs from the second on
    (
        "the second run names the operation",
        [ran("first", UNSEEN), ran("suspects", OVERFLOWS, 3)],
        (UNDECIDED, "1"),
        ["range overflow in step 3: mul of 1, forward"],
    ),
    (
        "the second run names nothing",
        [ran("first", UNSEEN), ran("suspects", FINITE, 3)],
        (UNDECIDED, ""),
        ["every step is finite"],
    ),
    ("the second run dies", [ran("first", UNSEEN), ran("suspects", None, 3)], (UNDECIDED, ""), ["the process died"]),
    ("finite at a scale of 1", [ran("first", SCALED), ran("scale of 1", FINITE, 3)], (SCALE, "1"), ["finite"]),
    (
        "saturates at a scale of 1",
        [ran("first", SCALED), ran("scale of 1", SILENT_AT_ONE, 3)],
        (SILENT, "2"),
        ["silent saturation in step 3: mul of 2, forward"],
    ),
    (
        "too small at a scale of 1",
        [ran("first", SCALED), ran("scale of 1", ZERO_AT_ONE, 3)],
        (SCALE, "1"),
        ["silent saturation in step 3: mul of 1, forward"],
    ),
    (
        "overflows at a scale of 1",
        [ran("first", SCALED), ran("scale of 1", OVERFLOWS, 3)],
        (UNDECIDED, "1"),
        ["range overflow in step 3: mul of 1, forward"],
    ),
    (
        "overflows elsewhere at the scale that the script set instead of 1",
        [
            ran("first", SCALED),
            ran("scale of 1", SCALED.model_copy(update={"located": at(3, module="2", **BACKWARD)}), 3),
        ],
        (UNDECIDED, "1"),
        ["scale overflow in step 3: mul of 2, backward"],
    ),
    (
        "not finite at a scale of 1, by a value that vanished",
        [ran("first", SCALED), ran("scale of 1", INFINITE_AT_ONE, 3)],
        (UNDECIDED, "1"),
        ["range overflow in step 3: mul of 1, forward"],
    ),
    (
        "not finite at a scale of 1, and nobody knows where",
        [ran("first", SCALED), ran("scale of 1", UNSEEN.model_copy(update={"watched": [3]}), 3)],
        (UNDECIDED, "1"),
        ["step 3 is not finite"],
    ),
    (
        "skipped at a scale of 1, as is normal",
        [ran("first", SCALED), ran("scale of 1", Evidence(watched=[3], bad_steps=[3]), 3, run=record_of(skipped=[3]))],
        (UNDECIDED, "1"),
        ["1 update skipped, as is normal"],
    ),
    (
        "the step is not reached at a scale of 1",
        [ran("first", SCALED), ran("scale of 1", Evidence(located=at(2), watched=[2]), 3)],
        (UNDECIDED, "1"),
        ["the step was not reached"],
    ),
    (
        "the run at a scale of 1 dies",
        [ran("first", SCALED), ran("scale of 1", None, 3)],
        (UNDECIDED, "1"),
        ["the step was not reached"],
    ),
    ("finite in FP32", [ran("first", BROKEN), ran("fp32", FINITE, 3)], (RANGE, "1"), ["finite"]),
    (
        "not finite in FP32 either",
        [ran("first", BROKEN), ran("fp32", BROKEN_IN_FP32, 3)],
        (INVALID, "1"),
        ["invalid operation in step 3: mul of 1, forward"],
    ),
    (
        "FP32 does not reach the step",
        [ran("first", BROKEN), ran("fp32", Evidence(), 3)],
        (UNDECIDED, "1"),
        ["the step was not reached"],
    ),
    (
        "the run in FP32 dies",
        [ran("first", BROKEN), ran("fp32", None, 3)],
        (UNDECIDED, "1"),
        ["the step was not reached"],
    ),
    (
        "a script that goes another way in FP32 proves nothing",
        [ran("first", UNSEEN), ran("suspects", BROKEN, 2), ran("fp32", FINITE, 3)],
        (UNDECIDED, "1"),
        ["invalid operation in step 3: mul of 1, forward", "finite"],
    ),
    (
        "an overflow that FP32 does not have",
        [ran("first", OVERFLOWS), ran("fp32", FINITE, 3)],
        (RANGE, "1"),
        ["finite"],
    ),
    (
        "scale of 1, then FP32",
        [ran("first", SCALED), ran("scale of 1", BROKEN, 3), ran("fp32", FINITE, 3)],
        (RANGE, "1"),
        ["invalid operation in step 3: mul of 1, forward", "finite"],
    ),
    (
        "not finite under fp32, where the script itself still asks for 16 bits",
        [ran("first", BROKEN), ran("fp32", BROKEN, 3)],
        (UNDECIDED, "1"),
        ["invalid operation in step 3: mul of 1, forward"],
    ),
    (
        "the script's own 16 bits were the cause",
        [ran("first", BROKEN), ran("fp32", BROKEN, 3), wide(FINITE)],
        (RANGE, "1"),
        ["invalid operation in step 3: mul of 1, forward", "finite"],
    ),
    (
        "not finite with all of it in FP32",
        [ran("first", BROKEN), ran("fp32", BROKEN, 3), wide(BROKEN)],
        (INVALID, "1"),
        ["invalid operation in step 3: mul of 1, forward"] * 2,
    ),
    (
        "the script's own run was all FP32",
        [ran("first", BROKEN_IN_FP32)],
        (INVALID, "1"),
        [],
    ),
    (
        "an overflow of a training that FP32 ends as well, in another place",
        [
            ran("first", OVERFLOWS),
            ran("fp32", BROKEN_IN_FP32.model_copy(update={"located": at(2, module="2", largest=None)}), 3),
        ],
        (INVALID, "2"),
        ["invalid operation in step 2: mul of 2, forward"],
    ),
    (
        "an overflow of a training that FP32 ends as well, and nobody knows where",
        [ran("first", OVERFLOWS), ran("fp32", UNSEEN_IN_FP32, 3)],
        (UNDECIDED, "1"),
        ["step 3 is not finite"],
    ),
    (
        "a run that is stopped teaches nothing",
        [ran("first", BROKEN), replace(ran("fp32", None, 3), stopped_by="SIGINT")],
        (UNDECIDED, "1"),
        ["stopped by SIGINT"],
    ),
]


@pytest.mark.parametrize(("runs", "expected", "outcomes"), [case[1:] for case in FURTHER], ids=[c[0] for c in FURTHER])
def test_a_further_run_changes_the_verdict(
    runs: list[ScriptRun], expected: tuple[str, str], outcomes: list[str]
) -> None:
    record = diagnosis(runs, untried="no time")
    assert (record.verdict, record.module) == expected
    assert [p.outcome for p in record.passes[1:]] == outcomes
    assert record.run == runs[0].run
    assert (record.bad_steps, record.faulty_steps) == ([3], [3])
    assert max(t.step for t in record.trend) == 3


@pytest.mark.parametrize(
    ("policy", "operand", "form"),
    [
        ("fp16", "fp32", "fp16"),
        ("bf16", "fp32", "bf16"),
        ("fp16-master:init_scale=8", "fp32", "fp16"),
        ("as-is", "fp32", "fp16"),
        ("as-is", "bf16", "bf16"),
        ("fp16", "bf16", "bf16"),
    ],
)
def test_an_operation_that_fails_in_a_format_alone_names_the_format(policy: str, operand: str, form: str) -> None:
    operands = [OPERAND.model_copy(update={"format": operand})]
    broken = BROKEN.model_copy(update={"located": at(3, largest=None, format="fp32", operands=operands)})
    record = known([ran("first", broken, policy=policy), ran("fp32", FINITE, 3)])
    assert (record.verdict, record.format) == (RANGE, form)
    assert f"rounding to {form.upper()} gave the operation an input that it has no result for" in record.detail


@pytest.mark.parametrize(
    ("again", "verdict", "cause"),
    [
        (OVERFLOWS, RANGE, "fp16"),  # a cast of the script's own
        (
            BROKEN_IN_FP32.model_copy(update={"located": at(2, largest=None, format="fp32")}),
            INVALID,
            "the training itself",
        ),
        (UNSEEN_IN_FP32, RANGE, "the training itself"),
    ],
)
def test_an_overflow_with_a_fault_in_fp32_has_a_cause(again: Evidence, verdict: str, cause: str) -> None:
    record = known([ran("first", OVERFLOWS), ran("fp32", again, 3)])
    assert record.verdict == verdict
    assert [(n.what, n.value) for n in record.notes] == [("cause", cause)]
    assert (record.own_cast, record.fails_in_fp32) == (("fp16", False) if cause == "fp16" else ("", True))


# --- fixes -----------------------------------------------------------------------------------------------------------------------

HEALTHY, AGAIN = Evidence(), Evidence(located=at(3), faulty_steps=[3])
LATER = Evidence(located=at(5), faulty_steps=[5])
LOG = Evidence(located=at(5, op="log", largest=None, operands=[OPERAND]), faulty_steps=[5])
UNSEEN_LATER = Evidence(faulty_steps=[5], watched=[5])


def tries(*outcomes: Evidence | None, in_fp32: Evidence = FINITE) -> list[ScriptRun]:
    """Return the runs of a script that overflows in step 3, in FP32 and with one fix after the other."""
    runs = [ran("first", OVERFLOWS), ran("fp32", in_fp32, 3)]
    found = known(runs)
    for evidence in outcomes:
        offer = next_offer(found, tried(runs), last=3)
        assert offer is not None
        policy = offer.policy or Policy.parse("fp16")
        runs.append(ran("fix", evidence, 19, run=record_of(19, policy=str(policy)), policy=policy, offer=offer))
    return runs


FIXES: list[tuple[list[ScriptRun], bool, str, str]] = [
    (
        tries(HEALTHY),
        True,
        "keep 1 in FP32",
        "tried: the script ran 19 steps under fp16:fp32_modules=1, and nothing is",
    ),
    (tries(AGAIN, HEALTHY), True, "compute mul in FP32", "tried: the script ran 19 steps under"),
    (
        tries(None, AGAIN, HEALTHY),
        True,
        "train in BF16, which has FP32's range",
        "tried: the script ran 19 steps under bf",
    ),
    (  # a fault that is moved is no fault that is mended
        tries(LATER, HEALTHY),
        True,
        "compute mul in FP32",
        "tried: the script ran 19 steps under fp16:fp32=mul, and nothing is wrong",
    ),
    (
        tries(Evidence(located=at(5, pattern="2", module="2"), faulty_steps=[5]), HEALTHY),
        True,
        "keep 1 and 2 in FP32",
        "tried: the script ran 19 steps under fp16:fp32_modules=1+2, and nothing is wrong",
    ),
    (
        tries(Evidence(located=at(5, **BACKWARD), faulty_steps=[5], scaled=True), AGAIN, AGAIN, HEALTHY),
        True,
        "keep 1 in FP32, and begin with a loss scale of 4 and let it be dynamic",
        "tried: the script ran 19 steps under fp16:init_scale=4:fp32_modules=1, and nothing is wrong",
    ),
    (
        tries(AGAIN, Evidence(located=at(5, pattern="2", module="2"), faulty_steps=[5]), AGAIN, HEALTHY),
        True,
        "compute mul in FP32, and keep 2 in FP32",
        "tried: the script ran 19 steps under fp16:fp32=mul:fp32_modules=2, and nothing is wrong",
    ),
    (
        tries(LATER, AGAIN, AGAIN),
        False,
        "none of these is enough: keep 1 in FP32; compute mul in FP32; train in BF16, which has FP32's range",
        "the best of them, keep 1 in FP32, fails in step 5 instead of step 3 at mul() of 1; mezzo fallback searches",
    ),
    (
        tries(LOG, LOG, LOG),
        False,
        "none of these is enough: keep 1 in FP32; compute mul in FP32; train in BF16, which has FP32's range",
        "the best of them, keep 1 in FP32, fails in step 5 instead of step 3 at log() of 1; no precision fixes that one: "
        "the logarithm needs an argument above 0",
    ),
    (
        tries(UNSEEN_LATER, UNSEEN_LATER, UNSEEN_LATER),
        False,
        "none of these is enough: keep 1 in FP32; compute mul in FP32; train in BF16, which has FP32's range",
        "the best of them, keep 1 in FP32, fails in step 5 instead of step 3; no precision fixes that one: lower the "
        "learning rate, or clip the gradients",
    ),
    (
        tries(Evidence(located=at(3, pattern="2", module="2"), faulty_steps=[3]), HEALTHY),
        True,
        "keep 1 and 2 in FP32",
        "tried: the script ran 19 steps under fp16:fp32_modules=1+2",
    ),
    (
        tries(AGAIN, AGAIN, AGAIN),
        False,
        "none of these is enough: keep 1 in FP32; compute mul in FP32; train in BF16, which has FP32's range",
        "mezzo fallback searches for a set of modules to keep in FP32",
    ),
    (
        tries(AGAIN, AGAIN, AGAIN, in_fp32=OVERFLOWS),  # lists of operations do not reach the script's own casts
        False,
        "none of these is enough: keep 1 in FP32; compute the line of mul in FP32; train in BF16, which has FP32's range",
        "change the cast to fp16 in the script",
    ),
    (
        tries(AGAIN, AGAIN, AGAIN, in_fp32=UNSEEN_IN_FP32),
        False,
        "none of these is enough: keep 1 in FP32; compute mul in FP32; train in BF16, which has FP32's range",
        "the training fails in FP32 too: lower the learning rate, or clip the gradients",
    ),
]


@pytest.mark.parametrize(("runs", "helped", "fix", "note"), FIXES)
def test_the_first_fix_that_helps_is_offered(runs: list[ScriptRun], helped: bool, fix: str, note: str) -> None:
    record = diagnosis(runs)
    assert ("nothing is wrong" in [one.outcome for one in record.passes]) == helped == bool(record.fix_line)
    assert (record.fix_tried, record.fix) == (helped, fix)
    assert record.fix_note.startswith(note)


@pytest.mark.parametrize(
    ("evidence", "num_steps", "helped"), [(SCALED, 8, True), (SCALED, 7, False), (OVERFLOWS, 3, True)]
)
def test_a_loss_scale_has_to_fit_to_the_end_of_the_scripts_own_run(
    evidence: Evidence, num_steps: int, helped: bool
) -> None:
    first = ran("first", evidence, run=record_of(8))
    offer = next_offer(known([first]), [], last=3)
    assert offer is not None
    fix = ran("fix", HEALTHY, 8, run=record_of(num_steps, policy=str(offer.policy)), policy=offer.policy, offer=offer)
    assert diagnosis([first, fix]).fix_tried == helped


@pytest.mark.parametrize(
    ("located", "first"),
    [
        (at(**BACKWARD, symptom=values(op="log")), "begin with a loss scale of"),
        (at(**BACKWARD, largest=None, vanished=values(kind="vanished", largest=1e-9)), "keep 1 in FP32"),
        (at(backward=True), "keep 1 in FP32"),
        (at(loss_scale=1024.0), "keep 1 in FP32"),
    ],
)
def test_another_loss_scale_comes_first_where_it_moves_the_value(located: Located, first: str) -> None:
    record = known([ran("first", Evidence(located=located))])
    offer = next_offer(record, [], last=3)
    assert offer is not None
    assert offer.advice.startswith(first)


@pytest.mark.parametrize(
    ("runs", "untried", "note"),
    [
        ([ran("first", OVERFLOWS)], "the search was interrupted", "not tried: the search was interrupted"),
        (
            [ran("first", UNSEEN), ran("suspects", OVERFLOWS, 2)],
            "",
            "not tried: the script does not repeat the same steps each time",
        ),
        ([ran("first", BROKEN), ran("fp32", BROKEN, 3)], "", "not tried: it is a change of the script itself"),
        (
            [ran("first", Evidence(located=at(3, **BACKWARD, format="complex64", largest=1e9), faulty_steps=[3]))],
            "no time",
            "not tried: no time",
        ),
        ([ran("first", UNSEEN)], "", ""),
        ([ran("first", Evidence())], "", ""),
    ],
)
def test_a_fix_that_was_not_tried_says_why(runs: list[ScriptRun], untried: str, note: str) -> None:
    record = diagnosis(runs, untried=untried)
    assert (record.fix_tried, record.fix_note) == (False, note)
    assert bool(record.fix) == (record.verdict != "healthy")


# --- all evidence there can be ---------------------------------------------------------------------------------------------------

KINDS = st.sampled_from(["made", "entered", "constant", "refused", "vanished"])
MAGNITUDES = st.one_of(st.none(), st.just(math.nan), st.floats(min_value=0))
STEPS = st.lists(st.integers(1, 4), max_size=3, unique=True).map(sorted)
LOST = st.builds(
    LostValues,
    kind=KINDS,
    op=st.sampled_from(["mul", "log", "softmax", "linear", "std", "conv2d", "unheard_of"]),
    module=st.just("1"),
    pattern=st.sampled_from(["", "1", "2"]),
    backward=st.booleans(),
    format=st.sampled_from(["fp16", "bf16", "fp32", "complex64"]),
    largest=MAGNITUDES,
    loss_scale=st.sampled_from([1.0, 0.25, 65536.0]),
    operands=st.lists(st.just(OPERAND), max_size=2),
    parameter=st.booleans(),
    swallowed_by=st.lists(st.just("div"), max_size=1),
)
GRADIENTS = st.builds(
    WrongGradients,
    parameter=st.just("w"),
    error=st.floats(min_value=0),
    count=st.integers(1, 3),
    total=st.integers(3, 5),
    zeros=st.floats(0, 1),
)
LOCATED = st.builds(
    Located,
    step=st.integers(1, 5),
    source=LOST,
    vanished=st.none() | LOST,
    symptom=st.none() | LOST,
    gradients=st.none() | GRADIENTS,
    arrived=st.booleans(),
)
EVIDENCE = st.builds(
    Evidence,
    located=st.none() | LOCATED,
    found_by_rank=st.none() | st.integers(0, 3),
    watched=STEPS,
    bad_steps=STEPS,
    faulty_steps=STEPS,
    lost_step=st.none() | st.integers(1, 4),
    own_scaler=st.booleans(),
    scaled=st.booleans(),
    forced_eager=st.booleans(),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    first=EVIDENCE, more=st.lists(st.tuples(st.sampled_from(["suspects", "scale of 1", "fp32"]), st.none() | EVIDENCE))
)
def test_any_evidence_has_a_verdict_that_can_be_shown(
    first: Evidence, more: list[tuple[Role, Evidence | None]]
) -> None:
    runs = [ran("first", first), *(ran(role, evidence, 3) for role, evidence in more)]
    record = diagnosis(runs, untried="no time")
    assert (record.verdict == "healthy") == (not record.detail)
    located = [evidence is not None and evidence.located is not None for evidence in (first, *(e for _, e in more))]
    assert located[0] <= record.located <= any(located)
    assert len(record.passes) == len(runs)
    assert page_of(record).answer.sentence
    assert type(record).model_validate_json(record.model_dump_json()).verdict == record.verdict


@settings(max_examples=40, deadline=None, derandomize=True)
@given(evidence=EVIDENCE)
def test_evidence_survives_its_file(evidence: Evidence, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("evidence") / "record.evidence.json"
    write_evidence(evidence, str(path))
    found = read_evidence(path)
    assert found is not None
    assert repr(found) == repr(evidence)  # nan is not equal to itself


def test_a_process_that_died_leaves_no_evidence(tmp_path: Path) -> None:
    assert read_evidence(tmp_path / "record.evidence.json") is None


@pytest.mark.parametrize(
    ("op", "smallest", "largest", "advice"),
    [
        ("pow", 1e20, 2e21, "values grow beyond FP32: lower the learning rate, or clip gradients"),
        ("square", 1.0, 1e20, "values grow beyond FP32: lower the learning rate, or clip gradients"),
        ("pow", 0.0, 3.0, "keep the base above 0 where the exponent is below 1"),
        ("pow", 0.0, 1e20, "keep the base above 0 where the exponent is below 1"),
        ("log", 0.0, 1e20, "the logarithm needs an argument above 0"),
        ("sqrt", 0.0, 0.5, "a negative number has no root: keep the argument at or above 0"),
        ("rsqrt", 0.0, 0.5, "1 / 0 is infinite: keep the argument above 0"),
    ],
)
def test_a_power_that_overflows_fp32_is_not_taken_for_a_root(
    op: str, smallest: float, largest: float, advice: str
) -> None:
    operand = Operand(format="fp32", shape=[8, 1], largest=largest, smallest=smallest)
    located = at(3, op=op, largest=None, format="fp32", operands=[operand])
    found = diagnosis([ran("first", Evidence(located=located, faulty_steps=[3]))])
    assert found.fix == advice
