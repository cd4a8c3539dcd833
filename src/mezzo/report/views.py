"""What is said of each kind of record; the terminal and the page only draw it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mezzo.records import AnyRecord
from mezzo.report import audit, diagnose, fallback, ranges, sheets, verdicts

_SHEETS: dict[str, Callable[[Any], Any]] = {
    "run": sheets.run_sheet,
    "compare": verdicts.compare_sheet,
    "audit": audit.audit_sheet,
    "diagnose": diagnose.diagnose_sheet,
    "fallback": fallback.fallback_sheet,
    "ranges": ranges.ranges_sheet,
    "doctor": sheets.doctor_sheet,
}
"""By kind of record."""


def sheet_of(record: AnyRecord) -> Any:
    """Return the sheet of ``record``: its sentences and numbers as they are shown."""
    return _SHEETS[record.kind](record)
