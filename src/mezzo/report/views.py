"""How each kind of record is shown: one row a kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from mezzo.report import terminal
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
    real_gpus,
    resume_check,
    run,
    tune,
)
from mezzo.report.sheets.answers import Answer


@dataclass(frozen=True, kw_only=True)
class View:
    """How records of one kind are shown. The page's template is named after the kind; its charts are in ``mezzo.report.figures``."""

    sheet: Callable[[Any], Any]
    """From a record to its sentences and numbers as they are shown, with ``title``, ``headline``, ``environment`` and ``command``."""
    body: Callable[[Any, Console], None]
    """Prints a sheet's own tables to the terminal."""
    answer: Callable[[Any, Any], Answer]
    """From a record and its sheet to the answer that the page begins with."""
    framed: bool = True
    """Whether the terminal shows headline, environment and command around the body; without, the body ends with what matters most."""


VIEWS: dict[str, View] = {
    "run": View(sheet=run.run_sheet, body=terminal.print_run, answer=answers.run_answer),
    "compare": View(sheet=compare.compare_sheet, body=real_gpus.print_compare, answer=answers.compare_answer),
    "check": View(sheet=check.check_sheet, body=check.print_check, answer=check.check_answer, framed=False),
    "audit": View(sheet=audit.audit_sheet, body=terminal.print_audit, answer=answers.audit_answer),
    "diagnose": View(sheet=diagnose.diagnose_sheet, body=terminal.print_diagnose, answer=answers.diagnose_answer),
    "fallback": View(sheet=fallback.fallback_sheet, body=terminal.print_fallback, answer=answers.fallback_answer),
    "ranges": View(sheet=ranges.ranges_sheet, body=terminal.print_ranges, answer=answers.ranges_answer),
    "predict": View(sheet=predict.predict_sheet, body=predict.print_predict, answer=predict.predict_answer),
    "tune": View(sheet=tune.tune_sheet, body=tune.print_tune, answer=tune.tune_answer, framed=False),
    "resume_check": View(
        sheet=resume_check.resume_check_sheet,
        body=resume_check.print_resume_check,
        answer=resume_check.resume_check_answer,
    ),
    "doctor": View(sheet=doctor.doctor_sheet, body=terminal.print_doctor, answer=answers.doctor_answer),
}
"""By kind of record."""
