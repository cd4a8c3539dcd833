"""Say in a sentence what happened to a value. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from mezzo.formats import FORMATS
from mezzo.records import DiagnoseRecord, Operand, Reason, RunRecord

if TYPE_CHECKING:
    from mezzo.observe.nonfinite.blame import Fault
    from mezzo.observe.nonfinite.sources import Source

INTERRUPTED = (129, 130, 143)
"""Exit codes of a script that SIGHUP, Ctrl-C or SIGTERM ended."""
ITSELF = "the training itself"
"""As a cause: not its precision."""
DIVERGES = "lower the learning rate, or clip the gradients"
_FIRST_STEPS = 6


def detail(fault: Fault) -> str:
    """Return what happened at a fault."""
    source = fault.source
    if source.kind in ("entered", "constant"):
        count = sum(o.num_not_finite for o in source.operands)
        of = "a weight" if source.parameter else "an input"
        return f"{_where(source)} read {of} that was not finite before the step began: {count} values"
    if source.kind == "refused":
        return f"{_where(source)} is given {source.wide:.4g}; {_end(source.format)}, and torch raises an error"
    if source.kind == "vanished":
        return f"{_vanishing(source)}. {_off(fault)}"
    if source.because:
        failing = _failing(source.op, source.backward, source.operands)
        return f"{failing}. {_vanishing(source.because[0])}; in FP32 they stay"
    if fault.verdict == "invalid_operation":
        return _failing(source.op, source.backward, source.operands, " in FP32 either")
    reach = f"{_where(source)} reaches {fault.largest:.4g}; {_end(source.format)}"
    if fault.verdict == "scale_overflow":
        at_one = (fault.largest or 0.0) / source.scale
        return f"{reach}. Without the loss scale of {source.scale:g} it would be {at_one:.3g}"
    if fault.verdict == "silent_saturation":
        names = [f"{op}()" for op in source.swallowed] or ["what reads it"]
        turn = "turns" if len(names) == 1 else "turn"
        return f"{reach}. {' and '.join(names)} {turn} the infinity into finite numbers, and wrong ones. {_off(fault)}"
    if fault.symptom is not None:
        return f"{reach}. What came of it is wrong, and {_where(fault.symptom)} has no finite result for that"
    return reach


def harmless(source: Source) -> Reason:
    """Return what is known of a value that left its format and made no difference."""
    absorbed = " and ".join(f"{op}()" for op in source.absorbed)
    value = f"{source.op}() in {PurePath(source.line).name}"
    why = f"{source.wide:.3g} is infinite in {source.format.upper()}; {absorbed} makes the same of both, and no gradient changes"
    return Reason(what="harmless", value=value, reason=why)


def rounded_away(found: DiagnoseRecord, form: str) -> str:
    """Return what happened where an operation has no finite result for what it read, and a run in FP32 has one."""
    failing = _failing(found.op, found.phase == "backward", found.operands)
    return (
        f"{failing}. In FP32 the same step is finite: rounding to {form.upper()} gave the operation what it cannot take"
    )


def skipped(run: RunRecord, faulty: Sequence[int]) -> str:
    """Return how many updates a loss scale that does not find its way cost; nothing where it cost none."""
    count = run.steps.num_skipped
    lost = [step for step in faulty if step <= len(run.steps) and run.steps.skipped[step - 1]]
    if not lost:
        return ""
    total = len(run.steps)
    if count == total:
        reached = f", and the scale is down to {run.final_scale:g}" if run.final_scale is not None else ""
        return f"All {total} updates were skipped{reached}" if total > 1 else "The only update was skipped"
    steps = ", ".join(map(str, lost[:_FIRST_STEPS])) + (" and so on" if len(lost) > _FIRST_STEPS else "")
    share = "all" if len(lost) == count else f"{len(lost)} of them"
    return f"{count} of {total} updates were skipped, {share} after the loss scale had been found: steps {steps}"


def beyond_fp32(step: int) -> str:
    """Return what is known of a step whose operations were all inspected, and were finite."""
    return (
        f"every gradient of step {step} is finite, but their norm is beyond FP32's range: its square is above 3.4e38, so "
        "the training diverges or its loss is far too large"
    )


def unlocated(step: int, *, lost: bool) -> str:
    """Return what is known of a step that was not finite and was not inspected."""
    what = f"the loss of step {step} was" if lost else f"gradients of step {step} were"
    return f"{what} not finite; the operation that made it so was not seen"


def unfinished(run: RunRecord) -> str:
    """Return how a run ended that can be given no verdict."""
    count = len(run.steps)
    when = "before its first training step" if not count else f"after {count} training step{'s' if count > 1 else ''}"
    how = "was interrupted" if run.exit_code in INTERRUPTED else "ended"
    cause = f": {run.error.splitlines()[0]}" if run.error and run.exit_code not in INTERRUPTED else ""
    nothing = ". No fault was seen until then" if count else ""
    return f"the script {how} {when}, with exit code {run.exit_code}{cause}{nothing}"


def _where(source: Source) -> str:
    return _named(source.op, backward=source.backward)


def _named(op: str, *, backward: bool) -> str:
    return f"the backward pass of {op}()" if backward else f"{op}()"


def _end(form: str) -> str:
    limit = FORMATS[form].max if form in FORMATS else math.inf
    return f"{form.upper()} ends at {limit:g}"


def _vanishing(source: Source) -> str:
    least = FORMATS[source.format].min_subnormal if source.format in FORMATS else 0.0
    name = source.format.upper()
    return (
        f"{_where(source)} makes 0 of values up to {source.wide:.3g}, because {name}'s smallest number is {least:.2g}"
    )


def _off(fault: Fault) -> str:
    if fault.wrong is None:
        return ""
    name, error = fault.wrong
    wrong, total = fault.num_wrong
    zeros = f"{fault.zeros:.0%} of the elements of all gradients are 0 for that alone. " if fault.zeros else ""
    return f"{zeros}{wrong} of {total} gradients are wrong, that of {name} by {min(error, 99.99):.0%} of its norm"


def _failing(op: str, backward: bool, operands: Sequence[Operand], even: str = "") -> str:
    where = _named(op, backward=backward)
    return f"{where} has no finite result{even}; it read {'; '.join(map(_span, operands)) or 'no values'}"


def _span(operand: Operand) -> str:
    infinite = f" and {operand.num_not_finite} that are not finite" if operand.num_not_finite else ""
    return f"{operand.smallest:.3g} to {operand.largest:.3g}{infinite} in {operand.format}"
