"""Make the record of one run of a script from what is to blame for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mezzo.observe.nonfinite import fixes, words
from mezzo.observe.nonfinite.blame import Fault
from mezzo.observe.nonfinite.trend import trend_of
from mezzo.records import DiagnoseRecord, Pass, Reason, RunRecord


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """How a script was run."""

    own_scaler: bool
    """Whether the script's own GradScaler is in use."""
    scaled: bool
    """Whether any loss scale is."""
    forced_eager: bool
    """Whether compiled code ran eagerly in inspected steps."""
    problems: tuple[tuple[str, str], ...] = ()
    """Operations that could not be inspected, and why."""


def verdict_record(
    run: RunRecord,
    *,
    fault: Fault | None,
    bad_steps: Sequence[int],
    faulty_steps: Sequence[int],
    watched: Sequence[int],
    lost: int | None,
    circumstances: Circumstances,
    elsewhere: tuple[int, dict[str, Any] | None],
    harmless: Sequence[Reason] = (),
) -> DiagnoseRecord:
    """Return the record of one run of the script.

    Args:
        run: the run as a whole.
        fault: what was located; None where nothing was.
        bad_steps: steps whose loss or gradients were not finite.
        faulty_steps: those of them that are no normal skips.
        watched: steps whose operations were inspected.
        lost: the step whose loss was not finite.
        circumstances: how the script was run.
        elsewhere: the rank of the process where a fault began, and what it found.
        harmless: values that left a format and made no difference.
    """
    record = DiagnoseRecord(
        run=run,
        verdict="healthy",
        bad_steps=list(bad_steps),
        faulty_steps=list(faulty_steps),
        num_skipped=run.steps.num_skipped,
        own_scaler=circumstances.own_scaler,
        passes=[Pass(policy=run.policy, reason="", num_steps=len(run.steps), watched=list(watched))],
        forced_eager=circumstances.forced_eager,
        notes=_notes(circumstances),
    )
    rank, values = elsewhere
    if values is not None:
        why = "in this process it arrived with the gradients of all"
        found_by = Reason(what="found by", value=f"the process of rank {rank}", reason=why)
        record = record.model_copy(update={"notes": [*record.notes, found_by]})
    elif fault is not None:
        values = located(fault, circumstances)
    if values is not None:
        return fixes.offered(record.model_copy(update={**values, "trend": trend_of(run, values["step"])}))
    if faulty_steps:
        update = _unlocated(run, faulty_steps[0], lost=lost, scaled=circumstances.scaled)
        if lost is None and not circumstances.scaled and faulty_steps[0] in watched and not circumstances.problems:
            update |= {"detail": words.beyond_fp32(faulty_steps[0]), "fix": words.DIVERGES}
        return record.model_copy(update=update)
    if run.error is not None or run.exit_code or not len(run.steps):
        return record.model_copy(update={"verdict": "unfinished", "detail": words.unfinished(run)})
    return record.model_copy(update={"notes": [*record.notes, *harmless]})


def located(fault: Fault, circumstances: Circumstances) -> dict[str, Any]:
    """Return what a record says of a fault."""
    source = fault.source
    silent = fault.verdict == "silent_saturation"
    vanished = next((s for s in source.because if s.kind == "vanished"), None)
    return {
        "verdict": fault.verdict,
        "module": fault.module,
        "pattern": fault.pattern,
        "op": source.op,
        "origin": "vanished" if vanished is not None else source.kind,
        "phase": "backward" if source.backward else "forward",
        "step": fault.step,
        "line": source.line,
        "located": True,
        "detail": words.detail(fault),
        "format": source.format if vanished is None else vanished.format,
        "largest": fault.largest,
        "loss_scale": source.scale,
        "own_scaler": circumstances.own_scaler,
        "gradient": fault.wrong[0] if silent and fault.wrong is not None else "",
        "gradient_error": fault.wrong[1] if silent and fault.wrong is not None else None,
        "operands": source.operands,
        "swallowed_by": ", ".join(source.swallowed) if silent else "",
        "parameter": source.parameter,
    }


def _unlocated(run: RunRecord, step: int, *, lost: int | None, scaled: bool) -> dict[str, Any]:
    of_scale = scaled and lost is None
    return {
        "verdict": "scale_overflow" if of_scale else "invalid_operation",
        "step": step if of_scale or lost is None else lost,
        "phase": "backward" if lost is None else "forward",
        "detail": words.unlocated(step if lost is None else lost, lost=lost is not None),
        "own_scaler": False,
        "fix": "run it again, with the script's seeds set, so that the step can be inspected",
        "trend": trend_of(run, step),
    }


def _notes(circumstances: Circumstances) -> list[Reason]:
    notes = [Reason(what="not inspected", value=f"{op}()", reason=why) for op, why in circumstances.problems]
    if circumstances.forced_eager:
        why = "operations inside compiled kernels cannot be told apart; compiled code may round elsewhere"
        notes.append(Reason(what="torch.compile", value="inspected steps ran eagerly", reason=why))
    return notes
