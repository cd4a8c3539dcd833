"""A script's ranges as display strings: the initial loss scale comes first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from mezzo.records import (
    GRADIENTS,
    Casts,
    Histogram,
    KindRange,
    RangesRecord,
    ScaleWindow,
    TensorRange,
    UpdateLoss,
)
from mezzo.report import formatting as fmt
from mezzo.report.sheets import shared
from mezzo.report.sheets.shared import Fact, Grid, ScriptSheet

_SHOWN = 10
"""Number of tensors that the terminal lists; the page has all of them."""


@dataclass(frozen=True, kw_only=True)
class WindowLine:
    """The scale window of one format."""

    format: str
    window: str
    begin: str
    unscaled: str
    lost: str
    reason: str
    tone: str


@dataclass(frozen=True, kw_only=True)
class RangesSheet(ScriptSheet):
    """The words and tables of a ranges record, ready for any view."""

    details: str
    error: str
    format: str
    windows: list[WindowLine]
    ends: list[Fact]
    updates: list[Fact]
    kinds: Grid
    tensors: Grid
    tightest: Grid
    """The tensors that lose the most, for a view without room for all."""
    scales: Grid
    """The share of gradients that each scale loses in each format."""
    notes: list[Fact]
    method: str


def ranges_sheet(record: RangesRecord) -> RangesSheet:
    """Return the sheet of ``record``."""
    script = fmt.clean(PurePath(record.run.script).name)
    window = judged_window(record)
    tensors = [_tensor_row(t, record.format) for t in record.tensors]
    heads = ("tensor", "kind", "values", "zeros", "magnitudes")
    windowed = (*heads, f"window in {fmt.clean(record.format)}", "note")
    return RangesSheet(
        title=f"{script}: ranges",
        script=fmt.clean(record.run.script),
        headline=_headline(record, window, script),
        details=_details(record, window),
        error=shared.error_and_hint(record.run),
        format=fmt.clean(record.format),
        windows=[_window_line(w, record.little) for w in record.windows],
        ends=_ends(window),
        updates=[_update_fact(u) for u in record.updates],
        kinds=Grid(heads=(*heads, "note"), rows=[_kind_row(kind) for kind in record.kinds], numbers=(2, 3)),
        tensors=Grid(heads=windowed, rows=tensors, numbers=(2, 3)),
        tightest=Grid(heads=windowed, rows=[tensors[i] for i in _tightest(record)[:_SHOWN]], numbers=(2, 3)),
        scales=_scales(record),
        notes=shared.facts(record.notes),
        method=_method(record),
        environment=shared.environment_facts(record.run.environment),
        command=shared.command_text(record.run.command, record.run.environment),
    )


def power(exponent: int | None) -> str:
    """Return a power of two as text."""
    return fmt.MISSING if exponent is None else f"2^{exponent}"


def judged_window(record: RangesRecord) -> ScaleWindow | None:
    """Return the scale window of the format of the policy's gradients."""
    return next((w for w in record.windows if w.format == record.format), None)


def _headline(record: RangesRecord, window: ScaleWindow | None, script: str) -> str:
    form = fmt.clean(record.format)
    if shared.error_text(record.run) and not record.steps_watched:
        return f"{script} failed before a step could be recorded"
    if window is None or window.lowest is None:
        if any(t.kind in GRADIENTS and t.kept_fp32 and t.histogram.nonzero for t in record.tensors):
            return (
                f"{fmt.clean(record.policy_shown)} keeps every gradient of {script} in FP32, so there is none to scale"
            )
        return f"Every gradient of {script} is zero"
    if window.empty:
        return f"No loss scale fits the {form} gradients of {script}"
    if window.suggested == 0:
        return f"The gradients of {script} need no loss scale in {form}"
    return f"Begin with a loss scale of {power(window.suggested)} for the {form} gradients of {script}"


def _details(record: RangesRecord, window: ScaleWindow | None) -> str:
    if window is None or window.lowest is None:
        return ""
    if window.empty:
        ways = "bf16 has FP32's range" if record.format == "fp16" else "a format with a wider range"
        return (
            f"Small gradients need {power(window.lowest)} or more, large ones {power(window.highest)} or less: {ways}."
        )
    lost = f"unscaled, {fmt.share_text(window.lost_unscaled)} of the non-zero gradient values would become zero"
    return f"The scale window is {power(window.lowest)} to {power(window.highest)}; {lost}."


def _method(record: RangesRecord) -> str:
    steps, policy = record.steps_watched, fmt.policy_text(record.policy, record.policy_typed)
    which = fmt.plural(len(steps), "step") + (f" ({steps[0]} to {steps[-1]})" if len(steps) > 1 else "")
    return (
        f"Counted in FP32 on {which}, judged for {policy}. In a window nothing overflows and at most "
        f"{fmt.share_text(record.little)} of the non-zero gradient values become zero."
    )


def _window_line(window: ScaleWindow, little: float) -> WindowLine:
    if window.lowest is None or window.highest is None:
        span, tone = fmt.MISSING, "quiet"
    elif window.empty:
        span, tone = "empty", "bad"
    else:
        span, tone = f"{power(window.lowest)} to {power(window.highest)}", "good"
    begin = "no scale needed" if window.suggested == 0 else power(window.suggested)
    return WindowLine(
        format=fmt.clean(window.format),
        window=span,
        begin="none fits" if window.empty else begin,
        unscaled=fmt.share_text(window.lost_unscaled),
        lost=fmt.share_text(window.lost),
        reason=fmt.clean(window.reason),
        tone=tone,
    )


def _ends(window: ScaleWindow | None) -> list[Fact]:
    if window is None or window.highest is None:
        return []
    facts = []
    if window.at_top:
        names = ", ".join(map(fmt.clean, window.at_top))
        facts.append(Fact(what="largest", value=names, reason=f"they overflow first, above {power(window.highest)}"))
    if window.at_bottom:
        names = ", ".join(map(fmt.clean, window.at_bottom))
        facts.append(Fact(what="smallest", value=names, reason=f"they lose the most values at {power(window.highest)}"))
    return facts


def _update_fact(loss: UpdateLoss) -> Fact:
    names = [f"{fmt.clean(name)} {fmt.share_text(share)}" for name, share in loss.worst.items()]
    return Fact(
        what=fmt.clean(loss.format),
        value=f"{fmt.share_text(loss.share)} of {loss.num_updates} swallowed",
        reason=f"most in {', '.join(names)}" if names else "every update is kept",
        tone="bad" if loss.share > 0.5 else "warn" if loss.share > 0.05 else "good",
    )


def _kind_row(kind: KindRange) -> tuple[str, ...]:
    return (fmt.plural(kind.num_tensors, "tensor"), kind.kind, *_counted(kind.histogram), _not_finite(kind.histogram))


def _tensor_row(tensor: TensorRange, form: str) -> tuple[str, ...]:
    low, high = tensor.lowest.get(form), tensor.highest.get(form)
    window = fmt.MISSING
    if low is not None and high is not None:
        window = "empty" if low > high else f"{power(low)} to {power(high)}"
    note = ", ".join(filter(None, ["kept in FP32" if tensor.kept_fp32 else "", _not_finite(tensor.histogram)]))
    return (fmt.clean(tensor.name), tensor.kind, *_counted(tensor.histogram), window, note)


def _counted(values: Histogram) -> tuple[str, str, str]:
    """Return the number of values, the share of zeros, and the magnitudes of the others."""
    zeros = fmt.share_text(values.zeros / values.total) if values.total else fmt.MISSING
    span = f"{power(values.first_exponent)} to {power(values.last_exponent + 1)}" if values.nonzero else "all zero"
    return str(values.total), zeros, span


def _not_finite(values: Histogram) -> str:
    """Return how many values are not finite."""
    return ", ".join(f"{count} {word}" for count, word in ((values.infinite, "infinite"), (values.nan, "NaN")) if count)


def _tightest(record: RangesRecord) -> list[int]:
    """Return tensors by index, the most critical first: forward values that overflow, then gradients by lower end."""
    form = record.format

    def order(number: int) -> tuple[bool, int]:
        tensor = record.tensors[number]
        over = tensor.kind in ("activations", "weights") and tensor.highest.get(form, 0) < 0
        return not over, -tensor.lowest.get(form, -999)

    shown = [i for i, t in enumerate(record.tensors) if t.kind in GRADIENTS or t.highest.get(form, 0) < 0]
    return sorted(shown, key=order)


def _scales(record: RangesRecord) -> Grid:
    """Return what every format loses at every scale of the record."""
    curves = [lost_shares(record, w.format) for w in record.windows]
    rows = [
        (
            power(record.first_scale + place),
            *(f"{fmt.share_text(zeroed[place])} / {fmt.share_text(over[place])}" for zeroed, over in curves),
        )
        for place in range(len(curves[0][0]) if curves else 0)
    ]
    heads = ("scale", *(fmt.clean(w.format) for w in record.windows))
    return Grid(heads=heads, rows=rows, numbers=tuple(range(1, len(heads))))


def lost_shares(record: RangesRecord, form: str) -> tuple[list[float], list[float]]:
    """Return the shares of all gradient values that become zero and that overflow, for each scale."""
    kinds = [k for k in record.kinds if k.kind in GRADIENTS]
    casts: list[Casts] = [c for k in kinds for c in k.casts if c.format == form]
    total = sum(k.histogram.total for k in kinds) or 1
    zeroed = [sum(column) / total for column in zip(*(c.zeroed for c in casts), strict=True)]
    over = [sum(column) / total for column in zip(*(c.overflowed for c in casts), strict=True)]
    return zeroed, over
