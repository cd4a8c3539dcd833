"""Say what is wrong with a value that is not finite, and what to write instead.

The verdict follows from the operation itself, computed once more in FP32 from what it read:

- not finite in FP32 either: an *invalid operation*, as are values that were not finite when the step began;
- finite, in a forward pass: *range overflow*, or *silent saturation* where the loss and all gradients are finite;
- finite, in a backward pass: *scale overflow* if the result would fit the format at a loss scale of 1, because a backward
  pass is linear in the scale; else *range overflow*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mezzo.diagnosis import fixes
from mezzo.diagnosis.infinities import Source
from mezzo.diagnosis.names import Names
from mezzo.diagnosis.trend import trend_of
from mezzo.formats import FORMATS
from mezzo.records import Diagnosed, DiagnoseRecord, Pass, Reason, RunRecord

AS_IS = "as-is"


@dataclass(frozen=True)
class Fault:
    """Hold what is to blame for one step."""

    verdict: Diagnosed
    source: Source
    module: str
    step: int
    largest: float | None
    """The largest magnitude of the result in FP32."""


def judged(source: Source, step: int, names: Names, *, silent: bool = False) -> Fault:
    """Return the verdict on a source.

    Args:
        source: where values stopped being finite.
        step: the number of the step.
        names: gives modules their paths.
        silent: whether the step's loss and gradients are finite all the same.
    """
    verdict: Diagnosed
    limit = FORMATS[source.format].max if source.format in FORMATS else math.inf
    if source.kind != "made" or source.wide is None or not math.isfinite(source.wide):
        verdict = "invalid_operation"
    elif silent:
        verdict = "silent_saturation"
    elif source.backward and source.scale > 1 and source.wide / source.scale <= limit:
        verdict = "scale_overflow"
    else:
        verdict = "range_overflow"
    return Fault(verdict, source, names.of(source.module), step, source.wide)


def verdict_record(
    run: RunRecord,
    *,
    fault: Fault | None,
    bad_steps: Sequence[int],
    watched: Sequence[int],
    unlocated: int | None,
    forced_eager: bool,
    scaled: bool,
    own_scaler: bool,
    elsewhere: tuple[int, dict[str, object] | None],
) -> DiagnoseRecord:
    """Return the record of one run of the script.

    Args:
        run: the run as a whole.
        fault: what was located; None where nothing was.
        bad_steps: steps whose loss or gradients were not finite.
        watched: steps whose operations were looked at.
        unlocated: the first of these steps that is more than a loss scale on its way down.
        forced_eager: whether compiled code ran eagerly in watched steps.
        scaled: whether a loss scale is in use.
        own_scaler: whether it is the script's own GradScaler.
        elsewhere: the rank of another process that located a fault, and what it found.
    """
    update: dict[str, object] = {}
    record = DiagnoseRecord(
        run=run,
        verdict="healthy",
        bad_steps=list(bad_steps),
        num_skipped=run.steps.num_skipped,
        passes=[Pass(policy=run.policy, reason="", num_steps=len(run.steps), watched=list(watched))],
        forced_eager=forced_eager,
        notes=_notes(forced_eager=forced_eager),
    )
    rank, values = elsewhere
    if fault is not None:
        values = located(fault, own_scaler=own_scaler, as_is=run.policy == AS_IS, reached=run.final_scale)
    elif values is not None:
        why = "in this process it arrived with the gradients of all"
        update["notes"] = [*record.notes, Reason(what="found by", value=f"the process of rank {rank}", reason=why)]
    if values is not None:
        step = values["step"]
        assert isinstance(step, int)
        return record.model_copy(update={**values, **update, "trend": trend_of(run, step)})
    if unlocated is not None:
        return record.model_copy(update=_unlocated(run, unlocated, scaled=scaled))
    return record


def located(fault: Fault, *, own_scaler: bool, as_is: bool, reached: float | None = None) -> dict[str, object]:
    """Return what a record says of a fault.

    Args:
        fault: what was located.
        own_scaler: whether the script's own GradScaler is in use.
        as_is: whether the script's own precision is left alone.
        reached: the loss scale that the run came down to.
    """
    source = fault.source
    fix, line = _fix(fault, own_scaler=own_scaler, own_precision=as_is, reached=reached)
    return {
        "verdict": fault.verdict,
        "module": fault.module,
        "op": source.op,
        "phase": "backward" if source.backward else "forward",
        "step": fault.step,
        "line": source.line,
        "fix": fix,
        "fix_line": line,
        "located": True,
        "detail": _detail(fault),
        "format": source.format,
        "largest": fault.largest,
        "loss_scale": source.scale,
        "operands": source.operands,
        "swallowed_by": ", ".join(source.swallowed) if fault.verdict == "silent_saturation" else "",
    }


def _unlocated(run: RunRecord, step: int, *, scaled: bool) -> dict[str, object]:
    losses = run.steps.loss
    lost = step <= len(losses) and not math.isfinite(losses[step - 1])
    verdict = "scale_overflow" if scaled and not lost else "invalid_operation"
    what = "the loss of step {} was" if lost else "gradients of step {} were"
    detail = f"{what.format(step)} not finite; the operation that made it so was not seen"
    return {
        "verdict": verdict,
        "step": step,
        "phase": "forward" if lost else "backward",
        "detail": detail,
        "fix": "run it again, with the script's seeds set, so that the step can be looked at",
        "trend": trend_of(run, step),
    }


def _notes(*, forced_eager: bool) -> list[Reason]:
    notes = []
    if forced_eager:
        why = "operations inside compiled kernels cannot be told apart; compiled code may round elsewhere"
        notes.append(Reason(what="torch.compile", value="watched steps ran eagerly", reason=why))
    return notes


# --- words -----------------------------------------------------------------------------------------------------------------------


def _detail(fault: Fault) -> str:
    source = fault.source
    where = f"the backward pass of {source.op}" if source.backward else source.op
    name = source.format.upper()
    limit = FORMATS[source.format].max if source.format in FORMATS else math.inf
    if source.kind == "entered" or source.kind == "constant":
        count = sum(o.num_not_finite for o in source.operands)
        of = "a weight" if source.parameter else "an input"
        return f"{where} read {of} that was not finite before the step began: {count} values"
    if fault.verdict == "invalid_operation":
        return f"{where} gives no finite result in FP32 either; it read {_ranges(source)}"
    reach = f"{where} reaches {fault.largest:.4g}; {name} ends at {limit:g}"
    if fault.verdict == "scale_overflow":
        at_one = (fault.largest or 0.0) / source.scale
        return f"{reach}. Without the loss scale of {source.scale:g} it would be {at_one:.3g}"
    if fault.verdict == "silent_saturation":
        swallowed = " and ".join(source.swallowed)
        return (
            f"{reach}. {swallowed} makes finite numbers of the infinity: the loss looks right, the gradients are wrong"
        )
    return reach


def _ranges(source: Source) -> str:
    parts = [f"{o.smallest:.3g} to {o.largest:.3g} in {o.format}" for o in source.operands]
    return "; ".join(parts) or "nothing"


def _fix(fault: Fault, *, own_scaler: bool, own_precision: bool, reached: float | None) -> fixes.Fix:
    source = fault.source
    if fault.verdict == "scale_overflow":
        at_one = (fault.largest or 0.0) / source.scale
        return fixes.for_scale(source.format, at_scale_one=at_one, reached=reached, own_scaler=own_scaler)
    if fault.verdict != "invalid_operation":
        return fixes.for_range(
            source.format,
            module=fault.module,
            op=source.op,
            own_precision=own_precision,
            backward=source.backward,
        )
    if source.kind == "made":
        return fixes.for_invalid(source.op, source.operands)
    return fixes.for_entered(parameter=source.parameter, constant=source.kind == "constant")
