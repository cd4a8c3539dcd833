"""A script against its golden file: the answer, each check, the formats and findings that changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import Literal

from mezzo.records import GateCheck, GateRecord, GateStatus
from mezzo.report import formatting as fmt
from mezzo.report import pages
from mezzo.report.commands import ScriptCommands, best_first
from mezzo.report.log_entries import LogEntry, Table, TableValue, codes_of, plain_entry
from mezzo.report.sections import (
    Cell,
    Fact,
    Grid,
    Headline,
    JudgedCase,
    NextStep,
    Page,
    Paragraph,
    Section,
    SourceCode,
    facts_section,
)

_TONES = {"passed": "good", "regressed": "bad", "accepted": "quiet"}
_TONE_OF_STATUS: dict[GateStatus, str] = {
    "same": "good",
    "inside": "good",
    "better": "good",
    "failed": "bad",
    "not compared": "open",
}
_WORDS: dict[GateStatus, str] = {
    "same": "same",
    "inside": "inside the margin",
    "better": "better",
    "failed": "worse",
    "not compared": "not compared",
}


def page(record: GateRecord) -> Page:
    """Return what ``record`` says."""
    sentence = _sentence(record)
    new = [finding for finding in record.findings if finding.code in record.new_findings]
    answer = Headline(
        tone=_TONES[record.verdict],
        word=record.verdict,
        sentence=sentence,
        detail=_detail(record),
        error=pages.first_error_and_hint(record.runs),
        facts=_facts(record),
    )
    return Page(
        answer=answer,
        title=sentence,
        script=fmt.clean(record.script),
        sections=[
            Section(title=_title(record), blocks=[_checks(record), *_reading(record)]),
            Section(title="Formats that changed", blocks=[_formats(record)]),
            *(pages.finding_section(finding) for finding in new),
            facts_section("What else differs", pages.facts(record.notes)),
            SourceCode(run=record.runs[0], lines=pages.lines_of(new)),
        ],
        cases=[*map(_case, record.checks), *pages.cases_of(new)],
        steps=best_first(_next(record)),
        environment=pages.environment_facts(record.environment, framework=record.runs[0].framework),
        command=pages.command_text(record.command, record.environment),
    )


def _case(check: GateCheck) -> JudgedCase:
    outcomes: dict[GateStatus, Literal["failed", "skipped"]] = {"failed": "failed", "not compared": "skipped"}
    numbers = (
        f"{_value(check, check.golden)} in the golden, {_value(check, check.now)} now" if check.now is not None else ""
    )
    return JudgedCase(
        name=fmt.clean(check.name),
        outcome=outcomes.get(check.status, "passed"),
        message="; ".join(filter(None, [numbers, _reason(check)])),
    )


def _sentence(record: GateRecord) -> str:
    script, golden = fmt.clean(PurePath(record.script).name), fmt.clean(PurePath(record.golden_file).name)
    if record.verdict == "accepted":
        return f"{golden} has what {script} does now"
    names = [fmt.clean(check.name) for check in record.failed]
    if names:
        return f"{script} is not as in {golden}: {fmt.listed(names)}"
    return f"{script} trains as in {golden}"


def _detail(record: GateRecord) -> str:
    """Return the first reason why it failed, or what was not compared."""
    reasons = [f"{fmt.clean(check.name)}: {_reason(check)}." for check in record.failed if check.reason]
    left = [fmt.clean(check.name) for check in record.checks if check.status == "not compared"]
    return reasons[0] if reasons else f"Not compared: {fmt.listed(left)}." if left else ""


def _title(record: GateRecord) -> str:
    return "What changed since the golden before" if record.verdict == "accepted" else "Checks"


def _facts(record: GateRecord) -> list[Fact]:
    compared = [check for check in record.checks if check.status != "not compared"]
    facts = [Fact(what="checks", value=str(len(compared)))] if record.checks else []
    return [*facts, Fact(what="runs", value=str(len(record.runs))), Fact(what="policy", value=fmt.clean(record.policy))]


def _checks(record: GateRecord) -> Grid:
    return Grid(
        heads=("check", "golden", "now", "change", "margin", "verdict", "why"),
        rows=[_row(check) for check in record.checks],
        numbers=(1, 2, 3, 4),
        sortable=False,
    )


def _row(check: GateCheck) -> tuple[str | Cell, ...]:
    return (
        fmt.clean(check.name),
        _value(check, check.golden),
        _value(check, check.now),
        _change(check),
        _margin(check),
        Cell(text=_WORDS[check.status], tone=_TONE_OF_STATUS[check.status]),
        _reason(check),
    )


def _value(check: GateCheck, value: float | None) -> str:
    if value is None:
        return fmt.MISSING
    if check.unit == "bytes":
        return fmt.bytes_text(round(value))
    return fmt.ms_text(value) if check.unit == "ms" else fmt.number_text(value)


def _change(check: GateCheck) -> str:
    if check.golden is None or check.now is None or check.now == check.golden:
        return ""
    if check.unit and check.golden:
        return fmt.share_change_text(check.now / check.golden - 1.0)
    return fmt.signed_text(check.now - check.golden)


def _margin(check: GateCheck) -> str:
    if check.margin is None:
        return ""
    return fmt.share_text(check.margin / check.golden) if check.unit and check.golden else fmt.number_text(check.margin)


def _reason(check: GateCheck) -> str:
    chance = "" if check.error is None else f"by chance in {fmt.share_text(check.error)} of cases"
    return "; ".join(filter(None, [fmt.clean(check.reason), chance]))


def _reading(record: GateRecord) -> list[Paragraph]:
    units = {check.unit for check in record.checks if check.name == "speed" and check.status != "not compared"}
    if not units:
        return []
    times = "GPU time of a step" if "ms" in units else "CPU time of a step, in times of a reference workload beside it"
    return [Paragraph(text=f"Speed: {times}, in the fastest run of each side.", faint=True)]


def _formats(record: GateRecord) -> Grid:
    return Grid(
        heads=("module", "phase", "golden", "now"),
        rows=[
            (fmt.clean(one.module) or "outside modules", one.phase, ", ".join(one.golden), ", ".join(one.now))
            for one in record.format_changes
        ],
    )


def _next(record: GateRecord) -> Iterator[NextStep]:
    commands = ScriptCommands(record.runs[0], record.command)
    if commands.script is None:
        return
    names = {check.name for check in record.failed}
    if "runs" in names:
        yield from commands.alone("see whether the script also fails without Mezzo")
        return
    if names & {"formats", "findings"}:
        yield from commands.step("see which operation ran in which format, and where", "audit", policy=record.policy)
    if names - {"formats", "findings", "speed"}:
        yield from commands.step("find the operation at which it parts from the last commit", "diff", checkout="HEAD")
    if "speed" in names:
        yield from commands.step("see what holds it back", "watch", policy=record.policy)
    if record.verdict == "accepted":
        line = commands.script.under("gate").replace(" --accept", "", 1)
        yield NextStep(why="commit the golden file; from now on, type", command=line)
    elif record.verdict == "regressed":
        yield from commands.step("if the change is meant, accept it", "gate", accept="")


def log_entry(record: GateRecord) -> LogEntry:
    """Return what is logged of the record."""
    rows: list[list[TableValue]] = [
        [check.name, check.status, check.golden, check.now, check.margin, check.reason] for check in record.checks
    ]
    table = Table(name="checks", columns=["check", "status", "golden", "now", "margin", "reason"], rows=rows)
    plain = plain_entry(record)
    return LogEntry(
        record=record,
        script=plain.script,
        failed=record.verdict == "regressed",
        settings=plain.settings | {"policy": record.policy},
        tags=plain.tags | codes_of(record.findings),
        tables=[table],
    )
