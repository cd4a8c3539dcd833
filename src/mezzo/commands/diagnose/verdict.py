"""The verdict on a script, from the evidence of all its runs. Imports no torch.

What one run located suggests a verdict, by the operation recomputed in FP32 from its operands:

- loss and gradients finite, gradients wrong: *silent saturation*, by values too large or too small for the format;
- result not finite in FP32 either: an *invalid operation*, as are values that were not finite when the step began; but *range overflow*
  if an operand had left its format earlier, and the result would be finite otherwise;
- result finite in FP32, in a forward pass: *range overflow*;
- result finite in FP32, in a backward pass: *scale overflow* if it would fit its format at a loss scale of 1, because a backward pass is
  linear in the scale; else *range overflow*.

A further run decides, depending on its role (``known``). An overflow of the scale needs a run in which the same step was finite at a
lower one; an overflow of the range, one in which it was finite in FP32; an invalid operation, one in which it was not, with weights and
arithmetic in FP32. Without that run, or against it, the verdict is *undecided*, as it is where a scale is low and the run too short to
tell that it settled. Silent saturation needs none: its gradients were compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from mezzo.commands.diagnose import fixes, words
from mezzo.commands.diagnose.fixes import Tried
from mezzo.commands.diagnose.offers import Offer
from mezzo.commands.diagnose.words import TrainingStyle
from mezzo.error_texts import refuses_format
from mezzo.formats import FP16
from mezzo.observe.nonfinite.evidence import Evidence, Located, LostValues
from mezzo.observe.settings import FORMATS_OF_16_BITS, STEPS_THAT_SETTLE, DiagnoseSettings
from mezzo.policy import Policy
from mezzo.records import AS_IS, Diagnosed, DiagnoseRecord, Pass, RunRecord, TrendStep

Role: TypeAlias = Literal["first", "suspects", "skips", "scale of 1", "fp32", "fix", "fp32 later"]
"""The purpose of a run: the script as it is; to inspect the steps that were not finite; to inspect skips that the loss scale does not
explain; a loss scale of 1; FP32; to try a fix; FP32 up to the step in which the best fix fails."""

TREND_LENGTH = 10
"""Number of steps in a record, including the one with the fault."""


@dataclass(frozen=True, kw_only=True)
class ScriptRun:
    """One run of a script: its request, and its evidence."""

    role: Role
    reason: str
    policy: Policy | None
    """None for the script's own precision."""
    settings: DiagnoseSettings
    offer: Offer | None = None
    """The fix to try."""
    run: RunRecord | None = None
    """None before the script has run."""
    evidence: Evidence | None = None
    """None if the process died, or was stopped."""
    stopped_by: str = ""
    """The signal that stopped it."""

    @property
    def step(self) -> int:
        """The step under examination: the last one."""
        return self.settings.steps[-1]


def diagnosis(runs: Sequence[ScriptRun], *, untried: str = "", caller: TrainingStyle = "loop") -> DiagnoseRecord:
    """Return the verdict on a script whose first run left evidence.

    Args:
        runs: the script's runs in order; the first is the script as it is.
        untried: why not every fix was tried; empty if all that may help were.
        caller: the code that trains, in which a fix is written.
    """
    first, evidence = _showed(runs[0])
    record = known(runs).model_copy(update={"run": first})
    if record.has_place:
        untried = untried or ("" if repeats(runs) else "the script does not repeat the same steps each time")
        last = last_step(record, first)
        if untried:
            record = fixes.offered(record, untried=untried, caller=caller)
        else:
            record = fixes.settled(record, tried(runs), last=last, caller=caller)
    recurs = record.verdict == "range_overflow" and len(evidence.faulty_steps) > 1
    of_skips = recurs or record.verdict == "scale_overflow"
    skips = words.skipped(first, evidence.faulty_steps) if of_skips else ""
    if evidence.settled_scale is not None and of_skips:
        skips = words.settled(first, evidence.settled_scale, zeros=evidence.zeros)
    own_notes = judged(runs[0]).notes
    record = _decided(record, runs)
    return record.model_copy(
        update={
            "detail": ". ".join(filter(None, [record.detail, skips])),
            "passes": [_pass(ran) for ran in runs],
            "bad_steps": evidence.bad_steps,
            "faulty_steps": evidence.faulty_steps or record.faulty_steps,
            "num_skipped": first.steps.num_skipped,
            "notes": [*record.notes, *(note for note in own_notes if note not in record.notes)],
            "trend": _trend(first, max([record.step, *evidence.bad_steps])),
        }
    )


def known(runs: Sequence[ScriptRun]) -> DiagnoseRecord:
    """Return the verdict that follows from ``runs``, without a fix."""
    record = judged(runs[0])
    for ran in runs[1:]:
        if ran.evidence is None:
            continue
        if ran.role == "suspects":
            record = _inspected(record, ran)
        elif ran.role == "skips":
            record = _behind_skips(record, ran)
        elif ran.role == "scale of 1":
            record = _at_scale_of_1(record, ran)
        elif ran.role == "fp32":
            record = _in_fp32(record, ran, runs)
        elif ran.role == "fp32 later" and _fails(judged(ran)):
            note = words.later_in_fp32(judged(ran))
            record = record.model_copy(update={"fails_in_fp32": True, "notes": [*record.notes, note]})
    return record


def repeats(runs: Sequence[ScriptRun]) -> bool:
    """Return whether the script repeats the same steps in each run, as far as the runs show."""
    rerun = next((ran for ran in runs if ran.role in ("suspects", "skips") and ran.evidence is not None), None)
    located = None if rerun is None or rerun.evidence is None else rerun.evidence.located
    # An update is blamed for the step after it.
    return rerun is None or located is None or not {located.step, located.step + 1}.isdisjoint(rerun.settings.suspects)


def last_step(record: DiagnoseRecord, first: RunRecord) -> int:
    """Return the last step that must be healthy with a fix: only the whole run shows whether a loss scale fits."""
    return max(record.step, len(first.steps)) if record.verdict == "scale_overflow" else record.step


def tried(runs: Sequence[ScriptRun]) -> list[Tried]:
    """Return the fixes that were tried, and how the script did with each."""
    return [
        Tried(ran.offer, None if ran.evidence is None else judged(ran))
        for ran in runs
        if ran.offer is not None and not ran.stopped_by
    ]


def judged(ran: ScriptRun) -> DiagnoseRecord:
    """Return the verdict on one run by itself."""
    run, evidence = _showed(ran)
    record = DiagnoseRecord(
        run=run,
        verdict="healthy",
        bad_steps=evidence.bad_steps,
        faulty_steps=evidence.faulty_steps,
        num_skipped=run.steps.num_skipped,
        own_scaler=evidence.own_scaler,
        settled_scale=evidence.settled_scale,
        steps_needed=STEPS_THAT_SETTLE if evidence.may_settle_higher else None,
        session_policy=evidence.session_policy,
        forced_eager=evidence.forced_eager,
        notes=words.notes(evidence, backend=run.backend),
    )
    if evidence.located is not None and not _refused(run, evidence.located):
        return _of_fault(record, evidence.located)
    if evidence.faulty_steps:
        return _of_unseen(record, evidence)
    if run.error is not None or run.exit_code or not len(run.steps):
        place = {} if evidence.raised is None else _place_of(evidence.raised, step=len(run.steps) + 1)
        return record.model_copy(update={**place, "verdict": "unfinished", "detail": words.unfinished(run)})
    harmless = [words.harmless(value) for value in evidence.harmless]
    return record.model_copy(update={"notes": [*record.notes, *harmless]})


def verdict_on(located: Located) -> Diagnosed:
    """Return the kind of a located fault."""
    if located.gradients is not None:
        return "silent_saturation"
    if not located.fits_fp32:
        return "invalid_operation"
    return "scale_overflow" if located.fits_unscaled else "range_overflow"


def _refused(run: RunRecord, located: Located) -> bool:
    """Return whether the step ended because an operation does not support the format: an earlier mask of infinities is no fault."""
    return located.step > len(run.steps) and refuses_format(run.error or "")


def _of_fault(record: DiagnoseRecord, located: Located) -> DiagnoseRecord:
    source, gradients, verdict = located.source, located.gradients, verdict_on(located)
    return record.model_copy(
        update={
            **_place_of(source, step=located.step),
            "verdict": verdict,
            "origin": "vanished" if located.vanished is not None else source.kind,
            "parameter": source.parameter,
            "located": True,
            "detail": words.detail(located, verdict),
            "format": source.format if located.vanished is None else located.vanished.format,
            "largest": source.largest,
            "loss_scale": source.loss_scale,
            "static_scale": source.static_scale,
            "zero_eps": source.zero_eps,
            "gradient": "" if gradients is None else gradients.parameter,
            "gradient_error": gradients.error if gradients is not None and gradients.count else None,
            "loss_error": None if gradients is None else gradients.loss_error,
            "swallowed_by": "" if gradients is None else ", ".join(source.swallowed_by),
        }
    )


def _place_of(source: LostValues, *, step: int) -> dict[str, Any]:
    """Return the fields of a record that say where an operation is, and what it read."""
    return {
        "module": source.module,
        "pattern": source.pattern,
        "op": source.op,
        "origin": source.kind,
        "phase": "backward" if source.backward else "update" if source.in_update else "forward",
        "step": step,
        "line": source.line,
        "format": source.format,
        "operands": source.operands,
    }


def _of_unseen(record: DiagnoseRecord, evidence: Evidence) -> DiagnoseRecord:
    """Return the verdict on a faulty step without a known operation to blame."""
    lost, step = evidence.lost_step, evidence.faulty_steps[0]
    diverges = _has_infinite_norm_alone(evidence)
    return record.model_copy(
        update={
            "verdict": "invalid_operation" if diverges else "undecided",
            "origin": "norm" if diverges else "",
            "step": step if lost is None else lost,
            "phase": "backward" if lost is None else "forward",
            "detail": words.beyond_fp32(step) if diverges else words.unlocated(lost or step, lost=lost is not None),
            "own_scaler": False,
            "fix": fixes.DIVERGES if diverges else fixes.RUN_AGAIN,
        }
    )


def _has_infinite_norm_alone(evidence: Evidence) -> bool:
    """Return whether all operations of the first faulty step were inspected and finite: then the norm overflowed, in FP32."""
    faulty, inspected = evidence.faulty_steps[:1], evidence.located is None and not evidence.problems
    unscaled = evidence.lost_step is None and not evidence.scaled
    return inspected and unscaled and bool(faulty) and faulty[0] in evidence.watched


def _inspected(record: DiagnoseRecord, ran: ScriptRun) -> DiagnoseRecord:
    outcome, (_, evidence) = judged(ran), _showed(ran)
    explained = outcome.located or (_has_infinite_norm_alone(evidence) and not record.located)
    # Known at the end of the whole run only.
    settled = {"settled_scale": record.settled_scale, "steps_needed": record.steps_needed}
    return outcome.model_copy(update=settled) if explained else record


def _behind_skips(record: DiagnoseRecord, ran: ScriptRun) -> DiagnoseRecord:
    """Return a fault behind skipped updates: an operation whose result is not finite in FP32 either, whatever the loss scale."""
    outcome = judged(ran)
    if outcome.verdict != "invalid_operation" or not outcome.located:
        return record
    return outcome.model_copy(
        update={"detail": f"{outcome.detail}. {words.HIDDEN_BY_SKIP}", "faulty_steps": [outcome.step]}
    )


def _at_scale_of_1(record: DiagnoseRecord, ran: ScriptRun) -> DiagnoseRecord:
    """Return the fault that remains at a loss scale of 1; gradients too small for the format at that scale are no fault."""
    outcome, (_, evidence) = judged(ran), _showed(ran)
    if record.step not in evidence.watched or not outcome.located:
        return record
    no_other = (
        outcome.verdict == "scale_overflow" if record.step in evidence.bad_steps else outcome.origin == "vanished"
    )
    return record if no_other else outcome


def _in_fp32(record: DiagnoseRecord, ran: ScriptRun, runs: Sequence[ScriptRun]) -> DiagnoseRecord:
    """Return the verdict after a run in FP32, which may end an earlier step's training or be finite where the format is not."""
    outcome, (_, evidence) = judged(ran), _showed(ran)
    if _fails(outcome):
        if record.verdict != "range_overflow":
            return record
        of_script = outcome.located and outcome.format == record.format
        cause = _cause(record, of_script=of_script, step=outcome.step)
        if not _is_fp32(ran):  # a further run decides
            return record.model_copy(update=cause if of_script else {})
        found = outcome.verdict == "invalid_operation" and (outcome.located or outcome.origin == "norm")
        if found and outcome.step == record.step and outcome.line != record.line:
            outcome = outcome.model_copy(update={"detail": f"{outcome.detail}. {words.elsewhere(record)}"})
        return (outcome if found else record).model_copy(update=cause)
    if record.step not in evidence.watched or not repeats(runs) or record.verdict != "invalid_operation":
        return record
    if any(other.role == "skips" for other in runs):  # caused by the format, and rare enough for the loss scale to skip
        return judged(runs[0])
    own = FP16.name if runs[0].policy is None else runs[0].policy.compute
    narrow = next((o.format for o in record.operands if o.format in FORMATS_OF_16_BITS), own)
    changed = record.model_copy(update={"verdict": "range_overflow", "format": narrow})
    failed_before = any(other.role == "fp32" and other is not ran for other in runs)
    if failed_before and record.zero_eps is None:
        changed = changed.model_copy(update=_cause(changed, of_script=True, step=record.step))
    detail = words.zero_eps(changed) if record.zero_eps is not None else words.rounded_away(record, narrow)
    return changed.model_copy(update={"detail": detail})


def _cause(record: DiagnoseRecord, *, of_script: bool, step: int) -> dict[str, object]:
    """Return what a run that fails in FP32 as well adds to ``record``: the script's own cast is the cause, or the training."""
    note = words.cause_in_fp32(record, of_script=of_script, step=step)
    fact = {"own_cast": record.format} if of_script else {"fails_in_fp32": True}
    known = {"own_cast": record.own_cast, "fails_in_fp32": record.fails_in_fp32}
    return {**known, **fact, "notes": [*record.notes, note]}


def _fails(record: DiagnoseRecord) -> bool:
    return record.verdict not in ("healthy", "unfinished")


def _decided(record: DiagnoseRecord, runs: Sequence[ScriptRun]) -> DiagnoseRecord:
    """Return ``record`` if the run that decides on its verdict was made and agrees; otherwise as undecided, with the reason."""
    why = _UNDECIDED_BY.get(record.verdict, _nothing_missing)(record, runs)
    if not why:
        return record
    note = words.undecided(record, why)
    short = {"fix": fixes.TRAIN_LONGER.format(record.steps_needed)} if _is_too_short(record) else {}
    return record.model_copy(
        update={**short, "verdict": "undecided", "perhaps": record.verdict, "notes": [*record.notes, note]}
    )


def needs_fp32(record: DiagnoseRecord, runs: Sequence[ScriptRun]) -> bool:
    """Return whether only a run in FP32 can decide: none was made, or the last one still computed in 16 bits of the script's own."""
    if record.verdict not in ("range_overflow", "invalid_operation") or not (record.located or record.origin == "norm"):
        return False
    last = next((ran for ran in reversed(runs) if ran.role == "fp32"), None)
    if last is None:
        return record.verdict == "range_overflow" or not _is_all_fp32(runs)
    return last.evidence is not None and _fails(judged(last)) and not _is_fp32(last)


def _is_fp32(ran: ScriptRun) -> bool:
    """Return whether a run in FP32 computed all of its inspected steps in FP32, the script's own 16 bits too."""
    return ran.settings.changes.own_format == "fp32" or (ran.evidence is not None and not ran.evidence.narrow)


def _is_all_fp32(runs: Sequence[ScriptRun]) -> bool:
    """Return whether the script's own run computed nothing in 16 bits: then it is the run in FP32."""
    own = [ran for ran in runs if ran.role in ("first", "suspects", "skips") and ran.evidence is not None]
    return not any(ran.evidence.narrow for ran in own if ran.evidence is not None)


def _why_not_of_scale(record: DiagnoseRecord, runs: Sequence[ScriptRun]) -> str:
    if _is_too_short(record):
        return words.too_few_steps(record, steps=len(_showed(runs[0])[0].steps))
    lower = next((ran for ran in reversed(runs) if ran.role == "scale of 1"), None)
    watched = [] if lower is None or lower.evidence is None else lower.evidence.watched
    if lower is None or record.step not in watched or not repeats(runs):
        return words.NO_LOWER_SCALE
    return words.BAD_AT_LOWER_SCALE if record.step in _showed(lower)[1].bad_steps else ""


def _is_too_short(record: DiagnoseRecord) -> bool:
    return record.verdict == "scale_overflow" and record.steps_needed is not None


def _why_not_of_range(record: DiagnoseRecord, runs: Sequence[ScriptRun]) -> str:
    wide = next((ran for ran in reversed(runs) if ran.role == "fp32"), None)
    if wide is None or not _reached(wide, record.step) or not repeats(runs):
        return words.NO_FP32
    return words.BAD_IN_FP32 if _fails(judged(wide)) else ""


def _why_not_invalid(record: DiagnoseRecord, runs: Sequence[ScriptRun]) -> str:
    if _is_all_fp32(runs):
        return ""
    wide = next((ran for ran in reversed(runs) if ran.role == "fp32"), None)
    if wide is None or wide.evidence is None:
        return words.NO_FP32
    if _fails(judged(wide)):
        return "" if _is_fp32(wide) else words.STILL_16_BITS
    return words.GOOD_IN_FP32 if _reached(wide, record.step) else words.NO_FP32


def _nothing_missing(record: DiagnoseRecord, runs: Sequence[ScriptRun]) -> str:
    return ""


_UNDECIDED_BY: dict[str, Callable[[DiagnoseRecord, Sequence[ScriptRun]], str]] = {
    "scale_overflow": _why_not_of_scale,
    "range_overflow": _why_not_of_range,
    "invalid_operation": _why_not_invalid,
}


def _reached(ran: ScriptRun, step: int) -> bool:
    return ran.evidence is not None and (step in ran.evidence.watched or _fails(judged(ran)))


def _pass(ran: ScriptRun) -> Pass:
    policy, num_steps, watched = AS_IS if ran.policy is None else str(ran.policy), 0, list[int]()
    if ran.run is not None and ran.evidence is not None:
        policy, num_steps, watched = ran.run.policy, len(ran.run.steps), ran.evidence.watched
    return Pass(
        policy=policy,
        reason=ran.reason,
        num_steps=num_steps,
        watched=watched,
        outcome=_outcome(ran),
        tries_fix=ran.role == "fix",
    )


def _outcome(ran: ScriptRun) -> str:
    if ran.stopped_by:
        return f"stopped by {ran.stopped_by}"
    of_step = ran.role in ("scale of 1", "fp32", "fp32 later")
    if ran.evidence is None:
        return words.NOT_REACHED if of_step else words.DIED
    outcome = judged(ran)
    if not of_step:
        unexplained = bool(ran.evidence.unexplained_skips)
        return words.seen_with_fix(outcome) if ran.role == "fix" else words.seen(outcome, unexplained=unexplained)
    reached = ran.step in ran.evidence.watched
    bad = ran.step in ran.evidence.bad_steps or outcome.located
    if (bad and reached) if ran.role == "scale of 1" else _fails(outcome):
        return words.seen(outcome)
    return "finite" if reached else words.NOT_REACHED


def _trend(run: RunRecord, step: int) -> list[TrendStep]:
    """Return the last steps of ``run`` up to ``step``."""
    steps = run.steps
    return [
        TrendStep(
            step=i + 1,
            loss=steps.loss[i],
            grad_norm=steps.grad_norm[i],
            loss_scale=steps.loss_scale[i] if steps.loss_scale else math.nan,
            skipped=steps.skipped[i],
        )
        for i in range(max(0, step - TREND_LENGTH), min(step, len(steps)))
    ]


def _showed(ran: ScriptRun) -> tuple[RunRecord, Evidence]:
    assert ran.run is not None
    assert ran.evidence is not None
    return ran.run, ran.evidence
