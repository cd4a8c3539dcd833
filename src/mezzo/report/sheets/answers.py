"""The answer at the top of a page: one word, and the few numbers that support it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from mezzo.records import (
    AuditRecord,
    CompareRecord,
    DiagnoseRecord,
    DoctorRecord,
    FallbackRecord,
    RangesRecord,
    Row,
    RunRecord,
)
from mezzo.report import formatting as fmt
from mezzo.report.sheets import shared
from mezzo.report.sheets.bottleneck import LIMITS
from mezzo.report.sheets.compare import best_of
from mezzo.report.sheets.fallback import error_texts
from mezzo.report.sheets.shared import Fact


@dataclass(frozen=True, kw_only=True)
class Headline:
    """The answer of a record, above all tables."""

    tone: str
    word: str
    facts: list[Fact] = field(default_factory=list)
    """The evidence: a label, a value, and what it means."""


def compare_answer(record: CompareRecord, sheet: Any) -> Headline:
    """Return the answer of a comparison: the evidence for the best policy that trains like the baseline."""
    others = [row for row in record.rows if row.verdict != "baseline"]
    equal = [row for row in others if row.verdict == "equivalent"]
    if not others or record.shared_files:
        return Headline(tone="open" if not others else "bad", word="no verdict")
    if equal:
        return Headline(tone="good", word="equivalent", facts=evidence(best_of(equal), metric=sheet.metric_name))
    words = {row.verdict for row in others}
    if "undecided" in words:
        needed = [row.seeds_needed for row in others if row.verdict == "undecided" and row.seeds_needed]
        seeds = str(max(needed, default=0))
        deciding = [Fact(what="seeds that would decide", value=seeds, reason="in 80% of cases or more")]
        return Headline(tone="open", word="undecided", facts=deciding if needed else [])
    word = others[0].verdict.replace("_", " ") if len(words) == 1 else "not equivalent"
    return Headline(tone="warn" if words == {"different"} else "bad", word=word)


def evidence(row: Row, *, metric: str) -> list[Fact]:
    """Return how a policy compares with the baseline: loss, metric, memory and speed."""
    name = fmt.clean(row.policy_shown)
    facts = []
    loss = row.loss or next(iter(row.losses.values()), None)
    for what, compared in (("final loss", loss), (metric, row.metric)):
        if compared is not None:
            show = fmt.share_change_text if compared.scale == "ratio" else fmt.signed_text
            interval = fmt.interval_text(compared.low, compared.high, show=show)
            facts.append(Fact(what=f"{what}, {name}", value=show(compared.difference), reason=interval))
    if row.memory_ratio is not None:
        change = fmt.share_change_text(row.memory_ratio - 1.0)
        facts.append(Fact(what=f"memory, {name}", value=change, reason=fmt.bytes_text(row.memory.total_bytes)))
    if row.emulated:
        facts.append(Fact(what=f"speed, {name}", value="not measured", reason="emulated here; measure it on a GPU"))
    elif row.speedup is not None:
        spread = fmt.spread_text(row.speedup_low, row.speedup_high)
        facts.append(Fact(what=f"speed, {name}", value=fmt.ratio_text(row.speedup), reason=spread))
    return facts


def run_answer(record: RunRecord, sheet: Any) -> Headline:
    """Return the answer of a run: whether it trained, and its results."""
    if shared.error_text(record):
        return Headline(tone="bad", word="failed", facts=sheet.facts)
    if record.changed_nothing:
        return Headline(tone="warn", word="nothing changed", facts=sheet.facts)
    if record.watched and record.bottleneck is not None:
        known = record.bottleneck.limit != "unknown"
        change = [Fact(what="to change", value=fmt.clean(text)) for text in record.bottleneck.change[:1]]
        shares = [fact for fact in sheet.bottleneck if fact.what in record.bottleneck.shares]
        return Headline(
            tone="quiet" if known else "open", word=LIMITS[record.bottleneck.limit], facts=[*change, *shares][:5]
        )
    broken = any(fact.tone == "bad" for fact in sheet.facts)
    return Headline(tone="bad" if broken else "good", word="not finite" if broken else "trained", facts=sheet.facts)


def audit_answer(record: AuditRecord, sheet: Any) -> Headline:
    """Return the answer of an audit: the formats of the products, and the number of findings."""
    total = sum(record.flops_by_format.values())
    shares = sorted(record.flops_by_format.items(), key=lambda item: -item[1])
    facts = [
        Fact(what=f"FLOPs in {fmt.clean(form)}", value=fmt.share_text(flops / total)) for form, flops in shares[:3]
    ]
    facts += [
        Fact(
            what="casts",
            value=str(sum(c.count for c in record.casts)),
            reason=fmt.bytes_text(sum(c.bytes for c in record.casts)),
        ),
        Fact(what="memory traffic", value=fmt.bytes_text(record.bytes), reason="operands and results, no cache"),
    ]
    failed = bool(shared.error_text(record.run))
    if failed or not record.steps:
        return Headline(tone="bad", word="failed" if failed else "no step", facts=facts if record.steps else [])
    count = len(record.findings)
    severe = any(finding.severity == "error" for finding in record.findings)
    tone = "bad" if severe else "warn" if count else "good"
    return Headline(tone=tone, word=fmt.plural(count, "finding") if count else "nothing found", facts=facts)


_PLACE = ("module", "operation", "line", "step", "loss scale")


def diagnose_answer(record: DiagnoseRecord, sheet: Any) -> Headline:
    """Return the answer of a diagnosis: its verdict, and where."""
    facts = [fact for fact in sheet.place if fact.what in _PLACE]
    facts = [replace(fact, value=PurePath(fact.value).name) if fact.what == "line" else fact for fact in facts]
    if not facts:
        skipped = f"{record.num_skipped} of {len(record.run.steps)}"
        facts = [Fact(what="steps", value=str(len(record.run.steps))), Fact(what="skipped updates", value=skipped)]
    return Headline(tone=sheet.tone, word=sheet.verdict, facts=facts)


def ranges_answer(record: RangesRecord, sheet: Any) -> Headline:
    """Return the answer of a record of ranges: the scale window by format."""
    lines = sheet.windows
    facts = [
        Fact(what=f"{line.format}: begin with", value=line.begin, reason=f"window {line.window}") for line in lines
    ]
    judged = next((line for line in lines if line.format == fmt.clean(record.format)), None)
    if judged is None or shared.error_text(record.run):
        failed = bool(shared.error_text(record.run))
        return Headline(tone="bad" if failed else "open", word="failed" if failed else "no gradient", facts=facts)
    words = {"good": "a scale fits", "bad": "no scale fits"}
    return Headline(tone=judged.tone, word=words.get(judged.tone, "no gradient"), facts=facts)


def fallback_answer(record: FallbackRecord, sheet: Any) -> Headline:
    """Return the answer of a fallback search: how many modules to keep in FP32, and the error with and without them."""
    tones = {
        "found": "good",
        "does not pay": "warn",
        "not needed": "good",
        "elsewhere": "bad",
        "undecided": "open",
        "not repeatable": "open",
        "fp32 fails": "bad",
    }
    first = record.verifications[0] if record.verifications else None
    before, most = error_texts(record.error_before, record.tolerance if first is None else first.allowed)
    after = fmt.number_text(record.error_after if record.kept else None, digits=2)
    kept = str(len(record.kept)) if record.kept else fmt.MISSING
    known = [
        ("modules in FP32", kept, f"{fmt.share_text(record.fp32_share)} of the FLOPs"),
        ("gradient error before", before, f"{most} allowed" if most != fmt.MISSING else ""),
        ("with them", after, ""),
        ("runs that verified it", str(len(record.verifications)), ""),
    ]
    facts = [Fact(what=what, value=value, reason=reason) for what, value, reason in known if value != fmt.MISSING]
    return Headline(tone=tones[record.verdict], word=record.verdict, facts=facts)


def doctor_answer(record: DoctorRecord, sheet: Any) -> Headline:
    """Return the answer of a machine: how its best device computes in each format."""
    best = next((d for d in record.devices if d.kind != "cpu"), next(iter(record.devices), None))
    if best is None:
        return Headline(tone="bad", word="no device")
    facts = [Fact(what=fmt.clean(f.format), value=f.level) for f in best.formats]
    native = any(f.level == "native" and f.format not in ("fp32", "fp64") for f in best.formats)
    return Headline(
        tone="good" if native else "open", word="16 bits natively" if native else "emulates 16 bits", facts=facts
    )
