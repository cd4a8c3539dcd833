"""How each kind of record is shown: one row a kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from mezzo.report import audit, diagnose, fallback, figures, predict, ranges, sheets, terminal, verdicts
from mezzo.report.figures import Plot


def _no_plots(record: Any) -> list[Plot]:
    return []


@dataclass(frozen=True, kw_only=True)
class View:
    """How records of one kind are shown. The page's template is named after the kind."""

    sheet: Callable[[Any], Any]
    """From a record to its sentences and numbers as they are shown, with ``title``, ``headline``, ``environment`` and ``command``."""
    body: Callable[[Any, Console], None]
    """Prints a sheet's own tables to the terminal."""
    plots: Callable[[Any], list[Plot]] = _no_plots
    """From a record to the plots of its page."""


VIEWS: dict[str, View] = {
    "run": View(sheet=sheets.run_sheet, body=terminal.print_run, plots=figures.run_plots),
    "compare": View(sheet=verdicts.compare_sheet, body=terminal.print_compare, plots=figures.compare_plots),
    "audit": View(sheet=audit.audit_sheet, body=terminal.print_audit, plots=audit.audit_plots),
    "diagnose": View(sheet=diagnose.diagnose_sheet, body=terminal.print_diagnose),
    "fallback": View(sheet=fallback.fallback_sheet, body=terminal.print_fallback, plots=fallback.fallback_plots),
    "ranges": View(sheet=ranges.ranges_sheet, body=terminal.print_ranges, plots=ranges.ranges_plots),
    "predict": View(sheet=predict.predict_sheet, body=terminal.print_predict),
    "doctor": View(sheet=sheets.doctor_sheet, body=terminal.print_doctor),
}
"""By kind of record."""
