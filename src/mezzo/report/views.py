"""How each kind of record is shown: one row per kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from mezzo.records import AnyRecord, RunRecord
from mezzo.report import bodies
from mezzo.report.sheets import (
    answers,
    audit,
    check,
    compare,
    diagnose,
    doctor,
    fallback,
    predict,
    ranges,
    resume_check,
    run,
    tune,
)
from mezzo.report.sheets.answers import Headline
from mezzo.report.sheets.shared import Sheet


def _nothing(sheet: Any, console: Console) -> None:
    """Print no details."""


@dataclass(frozen=True, kw_only=True)
class View:
    """How records of one kind are shown. The page's template is named after the kind; its charts are in ``mezzo.report.html``."""

    sheet: Callable[[Any], Sheet]
    """Turns a record into the texts that all views show."""
    body: Callable[[Any, Console], None]
    """Prints a sheet's answer to the terminal: what was found, and what to write."""
    answer: Callable[[Any, Any], Headline]
    """Turns a record and its sheet into the answer at the top of the page."""
    details: Callable[[Any, Console], None] = _nothing
    """Prints the tables behind the answer, after the next step."""
    framed: bool = True
    """Whether the terminal prints the headline before the body, and the environment and the command after it."""


VIEWS: dict[str, View] = {
    "run": View(sheet=run.run_sheet, body=bodies.print_run, details=bodies.run_details, answer=answers.run_answer),
    "compare": View(
        sheet=compare.compare_sheet,
        body=bodies.print_compare,
        details=predict.compare_details,
        answer=answers.compare_answer,
    ),
    "check": View(sheet=check.check_sheet, body=check.print_check, answer=check.check_answer, framed=False),
    "audit": View(
        sheet=audit.audit_sheet, body=bodies.print_audit, details=bodies.audit_details, answer=answers.audit_answer
    ),
    "diagnose": View(
        sheet=diagnose.diagnose_sheet,
        body=bodies.print_diagnose,
        details=bodies.diagnose_details,
        answer=answers.diagnose_answer,
    ),
    "fallback": View(
        sheet=fallback.fallback_sheet,
        body=bodies.print_fallback,
        details=bodies.fallback_details,
        answer=answers.fallback_answer,
    ),
    "ranges": View(
        sheet=ranges.ranges_sheet, body=bodies.print_ranges, details=bodies.ranges_details, answer=answers.ranges_answer
    ),
    "predict": View(
        sheet=predict.predict_sheet,
        body=predict.print_predict,
        details=predict.predict_details,
        answer=predict.predict_answer,
    ),
    "tune": View(sheet=tune.tune_sheet, body=tune.print_tune, answer=tune.tune_answer, framed=False),
    "resume_check": View(
        sheet=resume_check.resume_check_sheet,
        body=resume_check.print_resume_check,
        answer=resume_check.resume_check_answer,
    ),
    "doctor": View(sheet=doctor.doctor_sheet, body=bodies.print_doctor, answer=answers.doctor_answer),
}
"""By kind of record."""


def command_name(record: AnyRecord) -> str:
    """Return the command that made a record, as it is typed."""
    if isinstance(record, RunRecord) and record.watched:
        return "watch"
    return record.kind.replace("_", "-")
