"""What a fallback search says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath

from mezzo.records import FallbackRecord, FallbackVerdict, ModuleError, clear_error
from mezzo.report import formatting as fmt
from mezzo.report import pages
from mezzo.report.charts import modules
from mezzo.report.commands import ScriptCommands, best_first, preset_of, with_fp32
from mezzo.report.log_entries import LogEntry, Table, codes_of, run_entry
from mezzo.report.log_entries import TableValue as Entry
from mezzo.report.sections import (
    FEW_ROWS,
    Charts,
    Code,
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

_TONES: dict[FallbackVerdict, str] = {
    "found": "good",
    "does not pay": "warn",
    "not needed": "good",
    "elsewhere": "bad",
    "undecided": "open",
    "not repeatable": "open",
    "fp32 fails": "bad",
}
_NAMED = 6
_MOST_DIGITS = 6


def page(record: FallbackRecord) -> Page:
    """Return what ``record`` says."""
    script = fmt.clean(PurePath(record.run.script).name)
    suggested = Code(text=fmt.clean(record.suggested) if record.helps else "", copies="Copy the policy")
    each = (
        f"Each is a run with these {record.searched} kept in {_format(record)}; its error is the largest difference of a gradient from "
        "FP32's."
    )
    ignored = "Gradients that FP32 itself does not determine."
    checked = _verifications(record)
    return Page(
        title=f"{_format(record)} {record.searched} of {script}",
        script=fmt.clean(record.run.script),
        answer=_answer(record, script),
        sections=[
            Section(title="The policy to use", blocks=[suggested], shown_in="page"),
            facts_section("Result", _facts(record)),
            Charts(draw=lambda _: [modules.error_tree(record)]),
            Section(
                title=f"{record.searched.capitalize()} on their own, most suspect first",
                blocks=[_modules(record)],
                details=True,
                folded=True,
            ),
            Section(
                title="Verifications",
                blocks=[checked, Paragraph(text=each if checked.rows else "", faint=True)],
                details=True,
            ),
            Section(
                title="Not judged",
                blocks=[
                    Paragraph(text=ignored if record.ignored else "", faint=True),
                    FactTable(rows=pages.facts(record.ignored)),
                ],
                details=True,
                folded=True,
            ),
            facts_section("Notes", pages.facts(record.notes), details=True),
        ],
        steps=best_first(_next(record)),
        environment=pages.environment_facts(record.run.environment),
        command=pages.command_text(record.run.command, record.run.environment),
    )


def _format(record: FallbackRecord) -> str:
    return record.format_kept.upper()


def _answer(record: FallbackRecord, script: str) -> Headline:
    """Return how many modules or products to keep, and the error with and without them."""
    first = record.verifications[0] if record.verifications else None
    before, most = error_texts(record.error_before, record.tolerance if first is None else first.allowed)
    after = fmt.number_text(record.error_after if record.kept else None, digits=2)
    known = [
        (
            f"{record.searched} in {_format(record)}",
            str(len(record.kept)) if record.kept else fmt.MISSING,
            f"{fmt.share_text(record.kept_share)} of the FLOPs",
        ),
        ("gradient error before", before, f"{most} allowed" if most != fmt.MISSING else ""),
        ("with them", after, ""),
        ("runs that verified it", str(len(record.verifications)), ""),
    ]
    return Headline(
        tone=_TONES[record.verdict],
        word=record.verdict,
        sentence=_headline(record, script),
        detail=fmt.clean(record.reason),
        detail_follows_word=True,
        error=pages.error_and_hint(record.run) if record.run.error else "",
        facts=[Fact(what=what, value=value, reason=reason) for what, value, reason in known if value != fmt.MISSING],
    )


def error_texts(error: float | None, allowed: float | None) -> tuple[str, str]:
    """Return an error and what is allowed for it, with as many digits as it takes to tell them apart, two or more."""
    for digits in range(2, _MOST_DIGITS):
        texts = fmt.number_text(error, digits=digits), fmt.number_text(allowed, digits=digits)
        if texts[0] != texts[1]:
            break
    return texts


def _headline(record: FallbackRecord, script: str) -> str:
    policy = fmt.clean(record.policy_shown)
    if record.operations:
        named = ", ".join(map(fmt.clean, record.operations))
        return f"Keeping modules of {script} in FP32 does not help under {policy}; keeping these operations in FP32 does: {named}"
    unit, high = record.searched[:-1], _format(record)
    more, share = fmt.plural(len(record.kept), unit), fmt.share_text(record.kept_share)
    if record.verdict == "found":
        if record.error_before is None or not record.error_before < clear_error(record.tolerance):
            return f"{more} of {script} must stay in {high} under {policy}, {share} of the FLOPs"
        first = next(iter(record.verifications), None)
        error, allowed = error_texts(record.error_before, None if first is None else first.allowed)
        return (
            f"Under {policy} a gradient of {script} is off by {error}, where {allowed} is allowed; with {more} in {high}, {share} of the "
            "FLOPs, every gradient passes"
        )
    if record.verdict == "does not pay":
        rest = "stay in FP32" if record.instead == "fp32" else f"use {fmt.clean(record.instead)}"
        return (
            f"{policy} does not pay for {script}: {more} with {share} of the FLOPs would have to stay in {high}; {rest}"
        )
    if record.verdict == "not needed" and record.error_before == 0:
        return f"{policy} does not change a single bit of any gradient of {script}, so nothing was tried"
    if record.verdict == "not needed" and record.verifications and not record.verifications[0].passed:
        return f"No {unit} of {script} needs {high} under {policy}: none makes more than rounding on its own"
    return {
        "not needed": f"No {unit} of {script} needs {high} under {policy}: rounding explains the error of every gradient",
        "elsewhere": f"Keeping {record.searched} of {script} in {high} does not help under {policy}",
        "undecided": f"Single gradients of {script} cannot tell what {policy} needs; whole trainings can",
        "not repeatable": f"{script} does not compute the same result twice, so precision cannot be judged",
        "fp32 fails": f"{script} fails in FP32 too: precision is not the cause",
    }[record.verdict]


def _facts(record: FallbackRecord) -> list[Fact]:
    named = ", ".join(map(fmt.clean, record.kept[:_NAMED]))
    more = f" and {len(record.kept) - _NAMED} more" if len(record.kept) > _NAMED else ""
    known = [
        ("policy", fmt.policy_text(record.policy, record.policy_typed) if record.policy_typed else ""),
        (f"keep in {_format(record)}" if record.helps else f"would be kept in {_format(record)}", named + more),
        ("share of the FLOPs", fmt.share_text(record.bf16_share) if record.bf16_share else ""),
        ("instead", fmt.clean(record.instead)),
        ("operations in FP32", ", ".join(map(fmt.clean, record.operations))),
        ("error before", _error_of(record, [])),
        ("error with them", _error_of(record, record.kept) if record.kept else ""),
        ("tolerance", fmt.error_text(record.tolerance)),
        ("error of rounding alone", fmt.error_text(record.rounding) if record.rounding is not None else ""),
        ("error of FP32's last bit", fmt.error_text(record.noise) if record.noise is not None else ""),
        ("verifications", str(len(record.verifications))),
        ("modules run by themselves", "" if record.searched == "products" else str(len(record.modules))),
        ("policy file", fmt.clean(record.policy_file)),
    ]
    return [Fact(what=what, value=value) for what, value in known if value]


def _error_of(record: FallbackRecord, kept: Sequence[str]) -> str:
    """Return the error with a set kept, on as many batches as it was checked on, and what is allowed for that gradient."""
    trials = [t for t in record.verifications if t.kept == list(kept) and not t.operations]
    if not trials:
        return ""
    trial = max(trials, key=lambda t: len(t.steps))
    error, allowed = error_texts(trial.error, trial.allowed)
    of = f", of {fmt.clean(trial.tensor)}" if trial.tensor else ""
    return error + (f" ({allowed} allowed{of})" if trial.allowed is not None else of)


def _modules(record: FallbackRecord) -> Grid:
    if record.searched == "products":
        return _products([one for one in record.modules if not one.unnamed])
    rows = [
        (
            fmt.clean(m.module) + (" (the model)" if m.unnamed else ""),
            fmt.clean(m.type),
            *(fmt.error_text(e) for e in (m.output, m.dgrad, m.wgrad, None if m.reason else m.rounded)),
            fmt.flops_text(m.flops),
            "kept in FP32" if m.kept else fmt.clean(m.reason),
        )
        for m in record.modules
    ]
    heads = ("module", "type", "output", "dgrad", "wgrad", "rounded in", "FLOPs", "")
    return Grid(heads=heads, rows=rows, numbers=(2, 3, 4, 5, 6), shown=FEW_ROWS)


def _products(products: Sequence[ModuleError]) -> Grid:
    rows = [
        (
            fmt.clean(p.module),
            fmt.error_text(next((e for e in (p.output, p.dgrad, p.wgrad) if e is not None), None)),
            fmt.flops_text(p.flops),
            "kept in BF16" if p.kept else fmt.clean(p.reason),
        )
        for p in products
    ]
    return Grid(heads=("product", "error", "FLOPs", ""), rows=rows, numbers=(1, 2), shown=FEW_ROWS)


def _verifications(record: FallbackRecord) -> Grid:
    rows = []
    for number, trial in enumerate(record.verifications, start=1):
        kept = [*trial.kept, *trial.operations]
        names = ", ".join(map(fmt.clean, kept[:_NAMED])) or "nothing"
        more = f" and {len(kept) - _NAMED} more" if len(kept) > _NAMED else ""
        rows.append(
            (
                str(number),
                names + more,
                *error_texts(trial.error, trial.allowed),
                fmt.clean(trial.tensor),
                fmt.scale_text(trial.init_scale),
                ", ".join(map(str, trial.steps)),
                "passes" if trial.passed else "fails",
            )
        )
    heads = ("run", f"kept in {_format(record)}", "error", "allowed", "gradient of", "scale", "batches", "")
    return Grid(heads=heads, rows=rows, numbers=(2, 3))


def _next(record: FallbackRecord) -> Iterator[NextStep]:
    commands, policy = ScriptCommands(record.run), record.policy_shown
    if record.helps:
        kept = record.policy_file if record.policy_file and "," not in record.policy_file else record.suggested
        yield from commands.step(
            f"train with the {record.searched if record.kept else 'operations'} in {_format(record)}",
            "run",
            policy=kept,
        )
        yield from commands.step("see whether it trains like fp32", "compare", policies=with_fp32(kept))
        if not commands.script:
            yield from commands.step("see whether any value leaves the format", "diagnose", policy=kept)
    elif record.verdict == "fp32 fails":
        yield from commands.step("find the operation that is not finite in FP32", "diagnose", policy="fp32")
    elif record.verdict == "not repeatable":
        why = "after setting the script's seeds, so that it reads the same batches in the same order at each start"
        flags = {"per-gemm": ""} if record.searched == "products" else {}
        yield from commands.step(why, "fallback", policy=policy, **flags)
    elif record.verdict == "does not pay" and record.instead != "fp32":
        why = f"{record.instead} passes on the same batches; see whether it trains like fp32"
        yield from commands.step(why, "compare", policies=with_fp32(record.instead))
    elif record.verdict == "does not pay":
        yield from commands.step("stay in fp32", "run", policy="fp32")
        yield from commands.step(
            f"see whether {policy} trains like it all the same", "compare", policies=with_fp32(policy)
        )
    elif record.verdict == "not needed" and record.error_before == 0:
        yield from commands.step(f"{policy} changed nothing; see why", "audit", policy=policy)
    elif record.verdict in ("not needed", "undecided"):
        yield from commands.step(f"see whether {policy} trains like fp32", "compare", policies=with_fp32(policy))
    elif record.searched == "products":
        yield from commands.step("see whether bf16 itself trains like fp32", "compare", policies=with_fp32("bf16"))
    else:
        yield from commands.step("find the operation that loses values, and its line", "diagnose", policy=policy)
        if "bf16" not in preset_of(record.policy):
            yield from commands.step(
                "if bf16 passes, the range is the cause, and bf16 the fix", "fallback", policy="bf16"
            )
        why = "after moving that operation into a module of its own: fp32_modules names modules only"
        yield from commands.step(why, "fallback", policy=policy)


def log_entry(record: FallbackRecord) -> LogEntry:
    """Return what is logged of a fallback search."""
    errors = {"error_before": record.error_before, "error_after": record.error_after}
    rows: list[list[Entry]] = [[m.module, m.type, m.output, m.dgrad, m.wgrad, int(m.kept)] for m in record.modules]
    columns = ["module", "type", "output", "dgrad", "wgrad", f"kept_{record.format_kept}"]
    table = Table(name=record.searched, columns=columns, rows=rows)
    tags = {"verdict": record.verdict, **codes_of(record.run.findings)}
    numbers = {name: error for name, error in errors.items() if error is not None}
    return run_entry(record.run, record, tags=tags, numbers=numbers, tables=[table])
