"""What a record of ranges says: the initial loss scale comes first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath

from mezzo.records import (
    GRADIENTS,
    BlockLoss,
    BlockOperand,
    Histogram,
    KindRange,
    RangesRecord,
    ScaleWindow,
    TensorRange,
    UpdateLoss,
)
from mezzo.report import formatting as fmt
from mezzo.report import pages
from mezzo.report.charts import ranges
from mezzo.report.commands import ScriptCommands, after_failure, best_first, with_fp32, with_scale
from mezzo.report.log_entries import LogEntry, Table, run_entry
from mezzo.report.log_entries import TableValue as Entry
from mezzo.report.sections import (
    Cell,
    Charts,
    Fact,
    FactTable,
    Grid,
    Headline,
    NextStep,
    Page,
    Paragraph,
    Section,
    facts_section,
)

_SHOWN = 10
"""Number of tensors that the terminal lists; the page has all of them."""


def page(record: RangesRecord) -> Page:
    """Return what ``record`` says."""
    script, form = fmt.clean(PurePath(record.run.script).name), fmt.clean(record.format)
    tensors = [_tensor_row(t, record.format) for t in record.tensors]
    heads = ("tensor", "kind", "values", "zeros", "magnitudes")
    windowed = (*heads, f"window in {form}", "note")
    windows = Grid(
        heads=("format", "scale window", "begin with", "zero unscaled", "zero scaled", "why"),
        rows=[_window_row(w) for w in record.windows],
        sortable=False,
    )
    swallowed = "Non-zero updates that rounding would swallow if the weights themselves were stored in 16 bits."
    updates = [_update_fact(one) for one in record.updates]
    kinds = Grid(heads=(*heads, "note"), rows=[_kind_row(kind) for kind in record.kinds], numbers=(2, 3))
    tightest = Grid(heads=windowed, rows=[tensors[i] for i in _tightest(record)[:_SHOWN]], numbers=(2, 3))
    every = Grid(heads=windowed, rows=tensors, numbers=(2, 3))
    return Page(
        title=f"{script}: ranges",
        script=fmt.clean(record.run.script),
        answer=_answer(record, script),
        sections=[
            *_in_blocks(record),
            Section(title="Loss scale by format", blocks=[windows, Paragraph(text=_method(record), faint=True)]),
            facts_section("Consequences", pages.facts(record.notes)),
            facts_section(
                f"The tensors at both ends of the {form} window", _ends(ranges.judged_window(record)), details=True
            ),
            Charts(draw=lambda _: [ranges.exponents_chart(record)]),
            Section(title="Distribution of values", blocks=[kinds], details=True, folded=True),
            Charts(draw=lambda _: [ranges.scales_chart(record)]),
            Section(
                title="Every scale: share of all gradient values that become zero / overflow",
                blocks=[_scales(record)],
                shown_in="page",
                folded=True,
            ),
            Section(
                title="Gradients that need the largest scale", blocks=[tightest], shown_in="terminal", details=True
            ),
            Section(
                title="Weight updates without master weights",
                blocks=[FactTable(rows=updates), Paragraph(text=swallowed if updates else "", faint=True)],
                details=True,
            ),
            Section(title="Every tensor", blocks=[every], shown_in="page", folded=True),
        ],
        steps=best_first(_next(record)),
        environment=pages.environment_facts(record.run.environment),
        command=pages.command_text(record.run.command, record.run.environment),
    )


def _answer(record: RangesRecord, script: str) -> Headline:
    """Return the scale window by format."""
    window = ranges.judged_window(record)
    rows = [_window_row(one) for one in record.windows]
    facts = [
        Fact(what=f"{row[0]}: begin with", value=str(row[2]), reason=f"window {row[1].text}")
        for row in rows
        if isinstance(row[1], Cell)
    ]
    if pages.error_text(record.run):
        tone, word = "bad", "failed"
    elif _own_blocks(record):
        tone, word, facts = "quiet", "counted", []  # loss scales do not help blocks, which have their own
    elif window is None or window.lowest is None or window.highest is None:
        tone, word = "open" if window is None else "quiet", "no gradient"
    else:
        tone, word = ("bad", "no scale fits") if window.empty else ("good", "a scale fits")
    return Headline(
        tone=tone,
        word=word,
        sentence=_headline(record, window, script),
        detail=_details(record, window),
        error=pages.error_and_hint(record.run),
        facts=facts,
    )


def _headline(record: RangesRecord, window: ScaleWindow | None, script: str) -> str:
    form = fmt.clean(record.format)
    if pages.error_text(record.run) and not record.steps_watched:
        return f"{script} failed before a step could be recorded"
    if _own_blocks(record):
        own = _own_blocks(record)
        errors = [f"{name}s by {fmt.share_text(_relative_error(_of(own, name)))}" for name in _OPERANDS]
        return f"{fmt.clean(record.policy_shown)} would round {', '.join(errors[:-1])} and {errors[-1]} in the linear layers of {script}"
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
    return f"Begin with a loss scale of {ranges.power(window.suggested)} for the {form} gradients of {script}"


def _details(record: RangesRecord, window: ScaleWindow | None) -> str:
    if _own_blocks(record):
        worst, error = _worst_product(_own_blocks(record))
        return f"The most in {fmt.clean(worst)}: {fmt.share_text(error)}. In other formats and by other rules: below."
    if window is None or window.lowest is None:
        return ""
    if window.empty:
        ways = "bf16 has FP32's range" if record.format == "fp16" else "a format with a wider range"
        return f"Small gradients need {ranges.power(window.lowest)} or more, large ones {ranges.power(window.highest)} or less: {ways}."
    lost = f"unscaled, {fmt.share_text(window.lost_unscaled)} of the non-zero gradient values would become zero"
    return f"The scale window is {ranges.power(window.lowest)} to {ranges.power(window.highest)}; {lost}."


def _method(record: RangesRecord) -> str:
    steps, policy = record.steps_watched, fmt.policy_text(record.policy, record.policy_typed)
    which = fmt.plural(len(steps), "step") + (f" ({steps[0]} to {steps[-1]})" if len(steps) > 1 else "")
    return (
        f"Counted in FP32 on {which}, judged for {policy}. In a window nothing overflows and at most "
        f"{fmt.share_text(record.little)} of the non-zero gradient values become zero."
    )


def _window_row(window: ScaleWindow) -> tuple[str | Cell, ...]:
    if window.lowest is None or window.highest is None:
        span = Cell(text=fmt.MISSING, tone="quiet")
    elif window.empty:
        span = Cell(text="empty", tone="bad")
    else:
        span = Cell(text=f"{ranges.power(window.lowest)} to {ranges.power(window.highest)}", tone="good")
    begin = "no scale needed" if window.suggested == 0 else ranges.power(window.suggested)
    return (
        fmt.clean(window.format),
        span,
        "none fits" if window.empty else begin,
        fmt.share_text(window.lost_unscaled),
        fmt.share_text(window.lost),
        fmt.clean(window.reason),
    )


_OPERANDS: tuple[BlockOperand, ...] = ("activation", "weight", "gradient")


def _in_blocks(record: RangesRecord) -> list[Section]:
    """Return what every format in blocks and rule of scales would lose, and for the policy's own the layers."""
    own = _own_blocks(record)
    if not own:
        return []
    by_policy = {row.policy: [one for one in record.blocks if one.policy == row.policy] for row in record.blocks}
    heads = (
        "policy",
        *(f"{name}s" for name in _OPERANDS),
        "zeroed gradients",
        "saturated",
        "scale at its end",
        "worst product",
    )
    rows = [_blocks_row(policy, losses) for policy, losses in by_policy.items()]
    method = (
        "Error of the operands of linear layers' products, relative to their values (root mean square), each in blocks along its own sum. "
        "Saturated: beyond the largest element of its block. At its end: in a block whose scale is beyond the range of the scales' format."
    )
    layers = Grid(
        heads=("layer", "product", "operand", "error", "zeroed", "saturated"),
        rows=[
            (fmt.clean(one.layer), one.product, one.operand, fmt.share_text(one.relative_error), *_shares(one))
            for one in sorted(own, key=lambda one: -one.relative_error)
        ],
        numbers=(3, 4, 5),
    )
    return [
        Section(title="In blocks", blocks=[Grid(heads=heads, rows=rows), Paragraph(text=method, faint=True)]),
        Section(title=f"Products in {fmt.clean(own[0].policy)}", blocks=[layers], shown_in="page", folded=True),
    ]


def _blocks_row(policy: str, losses: Sequence[BlockLoss]) -> tuple[str, ...]:
    worst, error = _worst_product(losses)
    return (
        fmt.clean(policy),
        *(fmt.share_text(_relative_error(_of(losses, operand))) for operand in _OPERANDS),
        _share(_of(losses, "gradient"), "zeroed"),
        _share(losses, "saturated"),
        _share(losses, "at_end"),
        f"{fmt.clean(worst)} ({fmt.share_text(error)})",
    )


def _own_blocks(record: RangesRecord) -> list[BlockLoss]:
    """Return the losses under the judged policy."""
    return [one for one in record.blocks if one.policy == record.policy]


def _of(losses: Sequence[BlockLoss], operand: BlockOperand) -> list[BlockLoss]:
    return [one for one in losses if one.operand == operand]


def _worst_product(losses: Sequence[BlockLoss]) -> tuple[str, float]:
    """Return the product with the operand that is rounded most, and that operand's error."""
    one = max(losses, key=lambda loss: loss.relative_error)
    return f"{one.layer}.{one.product}", one.relative_error


def _relative_error(losses: Sequence[BlockLoss]) -> float:
    square = sum(one.square for one in losses)
    return (sum(one.error for one in losses) / square) ** 0.5 if square else 0.0


def _share(losses: Sequence[BlockLoss], count: str) -> str:
    total = sum(one.values for one in losses)
    return fmt.share_text(sum(getattr(one, count) for one in losses) / total) if total else fmt.MISSING


def _shares(loss: BlockLoss) -> tuple[str, str]:
    return _share([loss], "zeroed"), _share([loss], "saturated")


def _ends(window: ScaleWindow | None) -> list[Fact]:
    if window is None or window.highest is None:
        return []
    facts = []
    if window.at_top:
        names = ", ".join(map(fmt.clean, window.at_top))
        facts.append(
            Fact(what="largest", value=names, reason=f"they overflow first, above {ranges.power(window.highest)}")
        )
    if window.at_bottom:
        names = ", ".join(map(fmt.clean, window.at_bottom))
        facts.append(
            Fact(what="smallest", value=names, reason=f"they lose the most values at {ranges.power(window.highest)}")
        )
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
        window = "empty" if low > high else f"{ranges.power(low)} to {ranges.power(high)}"
    note = ", ".join(filter(None, ["kept in FP32" if tensor.kept_fp32 else "", _not_finite(tensor.histogram)]))
    return (fmt.clean(tensor.name), tensor.kind, *_counted(tensor.histogram), window, note)


def _counted(values: Histogram) -> tuple[str, str, str]:
    """Return the number of values, the share of zeros, and the magnitudes of the others."""
    zeros = fmt.share_text(values.zeros / values.total) if values.total else fmt.MISSING
    span = (
        f"{ranges.power(values.first_exponent)} to {ranges.power(values.last_exponent + 1)}"
        if values.nonzero
        else "all zero"
    )
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
    curves = [ranges.lost_shares(record, w.format) for w in record.windows]
    rows = [
        (
            ranges.power(record.first_scale + place),
            *(f"{fmt.share_text(zeroed[place])} / {fmt.share_text(over[place])}" for zeroed, over in curves),
        )
        for place in range(len(curves[0][0]) if curves else 0)
    ]
    heads = ("scale", *(fmt.clean(w.format) for w in record.windows))
    return Grid(heads=heads, rows=rows, numbers=tuple(range(1, len(heads))))


def _next(record: RangesRecord) -> Iterator[NextStep]:
    commands, policy = ScriptCommands(record.run), record.policy_shown
    window = next((w for w in record.windows if w.format == record.format), None)
    if record.run.error is not None or record.run.exit_code:
        yield from after_failure(record.run, commands, policy)
        return
    if window is not None and window.empty:
        yield from commands.step("find the modules to keep in FP32", "fallback", policy=policy)
        if record.format == "fp16":
            yield from commands.step("see whether bf16 trains like fp32", "compare", policies="fp32,bf16")
        return
    fits = policy if window is None or window.suggested is None else with_scale(record, window.suggested)
    why = f"see whether {policy} trains like fp32" if fits == policy else "train with a loss scale that fits"
    if fits != policy:
        yield from commands.step(why, "run", policy=fits)
        why = "see whether it trains like fp32"
    yield from commands.step(why, "compare", policies=with_fp32(fits))
    if not commands.script:
        yield from commands.step("see whether any value leaves the format", "diagnose", policy=fits)


def log_entry(record: RangesRecord) -> LogEntry:
    """Return what is logged of a record of ranges."""
    kinds = {f"exponents/{kind.kind}": kind.histogram for kind in record.kinds}
    tensors = {f"exponents of {tensor.kind}/{tensor.name}": tensor.histogram for tensor in record.tensors}
    counted = {name: histogram for name, histogram in (kinds | tensors).items() if histogram.counts}
    rows: list[list[Entry]] = [[w.format, w.lowest, w.highest, w.suggested, w.lost, w.reason] for w in record.windows]
    columns = ["format", "lowest_exponent", "highest_exponent", "suggested_exponent", "lost", "reason"]
    table = Table(name="scale windows", columns=columns, rows=rows)
    return run_entry(record.run, record, tags={}, histograms=counted, tables=[table])
