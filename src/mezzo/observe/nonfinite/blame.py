"""Decide which of the places where values were lost in a step is to blame for what went wrong in it, and what it is.

The verdict follows from the operation itself, computed once more in FP32 from what it read:

- not finite in FP32 either: an *invalid operation*, as are values that were not finite when the step began; but *range overflow*
  if it read something that had left the format before, and would be finite without that;
- finite, in a forward pass: *range overflow*;
- finite, in a backward pass: *scale overflow* if the result would fit the format at a loss scale of 1, because a backward
  pass is linear in the scale; else *range overflow*;
- loss and gradients finite, gradients wrong: *silent saturation*, by values too large or too small for the format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mezzo.formats import FORMATS
from mezzo.observe.module_names import Names
from mezzo.observe.nonfinite.gradient_error import Off, Weighed, faded
from mezzo.observe.nonfinite.propagation import InfinityTracer
from mezzo.observe.nonfinite.shadows import End
from mezzo.observe.nonfinite.sources import Source, Spoiled
from mezzo.records import Diagnosed

_WEIGHTY = 0.1  # of a result's norm: what vanished elsewhere is rounding


@dataclass
class Look:
    """What was recorded of one step's operations."""

    sources: list[Source]
    lost: list[Source]
    """What the loss came from, where it was not finite."""
    in_backward: list[Source]
    weighed: Weighed | None
    """What the range did to the gradients; None where there was no backward pass."""


@dataclass(frozen=True)
class Fault:
    """What is to blame for one step."""

    verdict: Diagnosed
    source: Source
    module: str
    pattern: str
    """The module's name for ``fp32_modules``; empty where it has none."""
    step: int
    largest: float | None
    """The largest magnitude of the result in FP32."""
    arrived: bool = False
    """Whether it may have come from another process, with the gradients of all."""
    symptom: Source | None = None
    """The operation that failed because of the source, where that is another one."""
    wrong: tuple[str, float] | None = None
    """The parameter whose gradient is furthest off without any value being infinite, and how far relative to its norm."""
    num_wrong: tuple[int, int] = (0, 0)
    """How many gradients are off, and how many there are."""
    zeros: float = 0.0
    """Of gradients that vanish: which part of their elements is 0 and would not be."""


def seen_of(tracer: InfinityTracer, marked: int) -> Look:
    """Return what lies before the mark."""
    sources = [s for s in tracer.sources if s.index < marked]
    spoiled = [s for s in tracer.spoiled if s.index < marked]
    lost: list[Source] = []
    for seen in spoiled:
        later = next((s for s in spoiled if s.index > seen.index and not s.backward), None)
        if not seen.backward and (later is None or _backward_between(tracer, seen, later)):
            lost += seen.sources
    backward = [s for seen in spoiled if seen.backward for s in seen.sources]
    weighed = next((w for w in reversed(tracer.weighed) if w.index <= marked), None)
    return Look(sources, list(dict.fromkeys(lost)), list(dict.fromkeys(backward)), weighed)


def _backward_between(tracer: InfinityTracer, first: Spoiled, last: Spoiled) -> bool:
    return any(noted[2] is not None for noted in tracer.trace.operations[first.index : last.index])


def blamed(
    look: Look, step: int, names: Names, *, loss_bad: bool, bad: bool, before: Callable[[], float] | None
) -> Fault | None:
    """Return what is to blame for a step, None where nothing is.

    Args:
        look: what was seen of it.
        step: its number.
        names: gives modules and parameters their names.
        loss_bad: whether its loss is not finite.
        bad: whether the loss or a gradient is not.
        before: gives the largest norm of gradients before; None where the step never ended.
    """
    refused = next((s for s in look.sources if s.kind == "refused"), None)
    if refused is not None and before is None:
        return _fault("range_overflow", refused, step, names)
    quiet = _saturated(look, step, names, bad=bad) or (None if bad else _vanished(look, step, names, before))
    if not bad:
        return quiet
    suspects = look.lost if loss_bad and look.lost else look.in_backward
    chosen = [s for s in suspects if s.kind != "constant"] or suspects
    source = min(chosen, key=lambda s: s.index, default=None)
    loud = None if source is None else _judged(source, step, names)
    if loud is not None and loud.source.kind == "entered" and not loss_bad:
        loud = replace(loud, arrived=True)
    return quiet if quiet is not None and loud is not None and loud.verdict == "scale_overflow" else loud


def _judged(source: Source, step: int, names: Names) -> Fault:
    """Return the verdict on a source that made the loss or a gradient infinite or NaN."""
    limit = FORMATS[source.format].max if source.format in FORMATS else math.inf
    earlier = [s for s in source.because if s.kind == "made"]
    if earlier:
        return _fault("range_overflow", earlier[0], step, names, symptom=source)
    if source.because:
        return _fault("range_overflow", source, step, names)
    if source.kind != "made" or source.wide is None or not math.isfinite(source.wide):
        return _fault("invalid_operation", source, step, names)
    if source.backward and source.scale > 1 and source.wide / source.scale <= limit:
        return _fault("scale_overflow", source, step, names)
    return _fault("range_overflow", source, step, names)


def _saturated(look: Look, step: int, names: Names, *, bad: bool) -> Fault | None:
    """Return what became infinite and made finite gradients wrong; where others are not finite, in a forward pass alone."""
    off = look.weighed.off[End.ABOVE] if look.weighed is not None else ()
    sources = {s for one in off for s in one.sources if s.kind == "made" and s.wide is not None}
    sources = {s for s in sources if not (bad and s.backward)}
    source = min(sources, key=lambda s: s.index, default=None)
    if source is None or look.weighed is None:
        return None
    return _fault("silent_saturation", source, step, names, off=off, weighed=look.weighed)


def _vanished(look: Look, step: int, names: Names, before: Callable[[], float] | None) -> Fault | None:
    """Return where gradients became zero because they are too small for the format."""
    off = look.weighed.off[End.BELOW] if look.weighed is not None else ()
    sources = sorted({s for one in off for s in one.sources if s.kind == "vanished"}, key=lambda s: s.index)
    if not sources or look.weighed is None or (before is not None and faded(look.weighed.norm, before())):
        return None
    heaviest = max(sources, key=lambda s: s.share)
    source = next((s for s in sources if s.share >= _WEIGHTY), heaviest)
    return _fault("silent_saturation", source, step, names, off=off, weighed=look.weighed)


def _fault(
    verdict: Diagnosed,
    source: Source,
    step: int,
    names: Names,
    *,
    symptom: Source | None = None,
    off: Sequence[Off] = (),
    weighed: Weighed | None = None,
) -> Fault:
    worst = max(off, key=lambda one: one.error, default=None)
    return Fault(
        verdict=verdict,
        source=source,
        module=names.of(source.module),
        pattern=names.pattern(source.module),
        step=step,
        largest=source.wide,
        symptom=symptom,
        wrong=None if worst is None else (names.parameter(worst.parameter), worst.error),
        num_wrong=(len(off), weighed.num_gradients if weighed is not None else 0),
        zeros=weighed.zeros if weighed is not None and source.kind == "vanished" else 0.0,
    )
