"""Decide which of the places where a step lost values is to blame for its fault.

The kind of fault follows from the operation itself, recomputed in FP32 from its operands (``mezzo.observe.nonfinite.verdict``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mezzo.observe.limits import FADED, WEIGHTY
from mezzo.observe.module_names import Names
from mezzo.observe.nonfinite.evidence import Harmless, Located, WrongGradients
from mezzo.observe.nonfinite.gradient_error import GradientErrors
from mezzo.observe.nonfinite.propagation import InfinityTracer
from mezzo.observe.nonfinite.shadows import RangeEnd
from mezzo.observe.nonfinite.sources import NonFiniteResult, Source
from mezzo.observe.trace import RawOperation


@dataclass
class InspectedStep:
    """The record of a step's operations."""

    sources: list[Source]
    of_loss: list[Source]
    """The sources of a loss that was not finite."""
    in_backward: list[Source]
    """The sources of non-finite results in the backward pass."""
    gradient_errors: GradientErrors | None
    """The errors of the gradients; None if there was no backward pass."""

    @property
    def harmless(self) -> list[Harmless]:
        """Values that left their format and made no difference."""
        return [
            Harmless(op=s.op, line=s.line, format=s.format, largest=s.wide, absorbed_by=list(s.absorbed))
            for s in self.sources
            if s.absorbed and s.wide and not s.swallowed
        ]


def inspected_step(tracer: InfinityTracer, marked: int) -> InspectedStep:
    """Return the record of the operations before the mark."""
    sources = [s for s in tracer.sources if s.index < marked]
    results = [result for result in tracer.nonfinite_results if result.index < marked]
    of_loss: list[Source] = []
    for result in results:
        later = next((r for r in results if r.index > result.index and not r.backward), None)
        if not result.backward and (later is None or _backward_between(tracer, result, later)):
            of_loss += result.sources
    backward = [s for result in results if result.backward for s in result.sources]
    gradient_errors = next((errors for errors in reversed(tracer.gradient_errors) if errors.index <= marked), None)
    return InspectedStep(sources, list(dict.fromkeys(of_loss)), list(dict.fromkeys(backward)), gradient_errors)


def _backward_between(tracer: InfinityTracer, first: NonFiniteResult, last: NonFiniteResult) -> bool:
    between = map(RawOperation._make, tracer.trace.operations[first.index : last.index])
    return any(operation.node is not None for operation in between)


def place_to_blame(
    inspected: InspectedStep, step: int, names: Names, *, loss_bad: bool, bad: bool, before: Callable[[], float] | None
) -> Located | None:
    """Return the place to blame for a step's fault; None if there is no fault.

    Args:
        inspected: the record of the step.
        step: its number.
        names: the names of modules and parameters.
        loss_bad: whether its loss is not finite.
        bad: whether the loss or a gradient is not finite.
        before: returns the largest gradient norm of the earlier steps; None if the step never ended.
    """
    refused = next((s for s in inspected.sources if s.kind == "refused"), None)
    if refused is not None and before is None:
        return _located(refused, step, names)
    quiet = _saturated(inspected, step, names, bad=bad) or (None if bad else _vanished(inspected, step, names, before))
    if not bad:
        return quiet
    suspects = inspected.of_loss if loss_bad and inspected.of_loss else inspected.in_backward
    chosen = [s for s in suspects if s.kind != "constant"] or suspects
    source = min(chosen, key=lambda s: s.index, default=None)
    if source is None:
        return None
    loud = _located(source, step, names, loss_bad=loss_bad)
    return quiet if quiet is not None and loud.fits_unscaled else loud


def _saturated(inspected: InspectedStep, step: int, names: Names, *, bad: bool) -> Located | None:
    """Return the overflow that made finite gradients wrong; in a bad step, only one of the forward pass."""
    gradient_errors = inspected.gradient_errors
    off = () if gradient_errors is None else gradient_errors.off[RangeEnd.ABOVE]
    sources = [s for gradient in off for s in gradient.sources if s.kind == "made" and s.wide is not None]
    source = min((s for s in sources if not (bad and s.backward)), key=lambda s: s.index, default=None)
    if source is None or gradient_errors is None:
        return None
    return Located(step=step, source=source.as_record(names), gradients=_wrong(gradient_errors, RangeEnd.ABOVE, names))


def _vanished(inspected: InspectedStep, step: int, names: Names, before: Callable[[], float] | None) -> Located | None:
    """Return where gradients became zero because they are too small for the format; None if the training has converged."""
    gradient_errors = inspected.gradient_errors
    off = () if gradient_errors is None else gradient_errors.off[RangeEnd.BELOW]
    sources = sorted({s for gradient in off for s in gradient.sources if s.kind == "vanished"}, key=lambda s: s.index)
    if not sources or gradient_errors is None or (before is not None and gradient_errors.norm < FADED * before()):
        return None
    heaviest = max(sources, key=lambda s: s.share)
    source = next((s for s in sources if s.share >= WEIGHTY), heaviest)
    return Located(step=step, source=source.as_record(names), gradients=_wrong(gradient_errors, RangeEnd.BELOW, names))


def _located(source: Source, step: int, names: Names, *, loss_bad: bool = True) -> Located:
    """Return the place where the loss or a gradient became infinite or NaN, or the earlier place that caused it."""
    earlier = next((s for s in source.because if s.kind == "made"), None)
    first = earlier or source
    vanished = next((s for s in first.because if s.kind == "vanished"), None)
    return Located(
        step=step,
        source=first.as_record(names),
        vanished=None if vanished is None else vanished.as_record(names),
        symptom=None if earlier is None else source.as_record(names),
        arrived=first.kind == "entered" and not loss_bad,
    )


def _wrong(gradient_errors: GradientErrors, end: RangeEnd, names: Names) -> WrongGradients:
    off = gradient_errors.off[end]
    worst = max(off, key=lambda gradient: gradient.error)
    return WrongGradients(
        parameter=names.parameter(worst.parameter),
        error=worst.error,
        count=len(off),
        total=gradient_errors.num_gradients,
        zeros=gradient_errors.zeros if end is RangeEnd.BELOW else 0.0,
    )
