"""Whether a script resumes: the answer, what is missing, and the losses of both runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from mezzo.records import AS_IS, ResumeCheckRecord
from mezzo.report import formatting as fmt
from mezzo.report import pages
from mezzo.report.commands import ScriptCommands, best_first
from mezzo.report.log_entries import LogEntry, plain_entry
from mezzo.report.sections import Fact, FactTable, Grid, Headline, NextStep, Page, Section, facts_section

_TONES = {
    "exact": "good",
    "differs": "warn",
    "does_not_resume": "bad",
    "no_checkpoint": "bad",
    "undecided": "open",
}
_MOST_STEPS = 6
_BEFORE_AGAIN = {
    "does_not_resume": "if it needs an argument to resume, pass it with --resume-with",
    "undecided": "after making the script deterministic, check again",
}


def page(record: ResumeCheckRecord) -> Page:
    """Return what ``record`` says."""
    headline, results = _headline(record, fmt.clean(PurePath(record.script).name)), _facts(record)
    losses = Grid(heads=("step", "undisturbed", "resumed"), rows=_losses(record), numbers=(1, 2), sortable=False)
    not_restored = Grid(
        heads=("state", "what", "undisturbed", "resumed"),
        rows=[tuple(map(fmt.clean, (one.state, one.name, one.undisturbed, one.resumed))) for one in record.missing],
        reasons=[fmt.clean(f"{one.evidence}. To fix it: {one.fix}.") for one in record.missing],
        sortable=False,
    )
    return Page(
        title=headline,
        script=fmt.clean(record.script),
        answer=Headline(
            tone=_TONES[record.verdict],
            word=record.verdict.replace("_", " "),
            sentence=headline,
            detail=fmt.clean(record.why).rstrip(".") + ".",
            error=pages.first_error_and_hint([record.whole, *([record.resumed] if record.resumed else [])]),
            facts=results,
        ),
        sections=[
            Section(title="", blocks=[FactTable(rows=results)], shown_in="terminal"),
            Section(title="What was not restored", blocks=[not_restored]),
            Section(title="Losses", blocks=[losses]),
            facts_section("Not restored, but without effect in this run", pages.facts(record.without_effect)),
        ],
        steps=best_first(_next(record)),
        environment=pages.environment_facts(record.environment),
        command=pages.command_text(record.command, record.environment),
    )


def _headline(record: ResumeCheckRecord, script: str) -> str:
    states = ", ".join(dict.fromkeys(one.state for one in record.missing))
    return {
        "exact": f"{script} resumes exactly",
        "differs": f"{script} resumes with differences: {states}",
        "does_not_resume": f"{script} does not resume",
        "no_checkpoint": f"{script} writes no checkpoint",
        "undecided": f"No verdict on {script}",
    }[record.verdict]


def _facts(record: ResumeCheckRecord) -> list[Fact]:
    rows = [Fact(what="steps", value=str(record.num_steps), reason="undisturbed")]
    if record.stopped_after is not None:
        rows.append(Fact(what="stopped after step", value=str(record.stopped_after), reason=f"by {record.stopped_by}"))
    if record.resumed_at is not None:
        steps = fmt.plural(record.resumed_steps, "step")
        repeated = (record.stopped_after or 0) - record.resumed_at
        reason = f"{steps} more" + (f", {repeated} of them repeated" if repeated > 0 else "")
        rows.append(Fact(what="resumed after step", value=str(record.resumed_at), reason=reason))
    if record.first_difference is not None:
        rows.append(Fact(what="first difference", value=f"step {record.first_difference}", tone="warn"))
    files = [fmt.clean(PurePath(path).name) for path in record.checkpoints]
    rows.append(Fact(what="checkpoints", value=str(len(files)), reason=", ".join(files[:3])))
    return rows


def _losses(record: ResumeCheckRecord) -> list[tuple[str, ...]]:
    if record.resumed_at is None or record.resumed is None:
        return []
    at, whole, resumed = record.resumed_at, record.whole.steps.loss, record.resumed.steps.loss
    begins = 0 if record.first_difference is None else max(record.first_difference - at - 2, 0)
    return [
        (str(at + n + 1), repr(whole[at + n]), repr(resumed[n]))
        for n in range(begins, min(begins + _MOST_STEPS, len(resumed), len(whole) - at))
    ]


def _next(record: ResumeCheckRecord) -> Iterator[NextStep]:
    commands = ScriptCommands(record.whole, record.command)
    if record.whole.exit_code:
        yield from commands.alone("see whether the script also fails without Mezzo")
    elif record.verdict == "differs":
        yield from commands.again("after changing the script, see whether anything is left")
    elif record.verdict in ("does_not_resume", "undecided"):
        yield from commands.again(_BEFORE_AGAIN[record.verdict])
    if record.verdict in ("differs", "does_not_resume", "no_checkpoint"):
        yield from commands.step("let Mezzo save and resume the unedited script", "run", policy=AS_IS, snapshot="5m")


def log_entry(record: ResumeCheckRecord) -> LogEntry:
    """Return what is logged of the record."""
    return plain_entry(record)
