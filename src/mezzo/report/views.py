"""What is said of each kind of record; the terminal and the page only draw it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mezzo.records import (
    AnyRecord,
    AuditRecord,
    CompareRecord,
    DiagnoseRecord,
    DoctorRecord,
    FallbackRecord,
    RangesRecord,
    RunRecord,
)
from mezzo.report import audit, diagnose, fallback, ranges, sheets, verdicts

_SHEETS: dict[type[AnyRecord], Callable[[Any], Any]] = {
    RunRecord: sheets.run_sheet,
    CompareRecord: verdicts.compare_sheet,
    AuditRecord: audit.audit_sheet,
    DiagnoseRecord: diagnose.diagnose_sheet,
    FallbackRecord: fallback.fallback_sheet,
    RangesRecord: ranges.ranges_sheet,
    DoctorRecord: sheets.doctor_sheet,
}


def sheet_of(record: AnyRecord) -> Any:
    """Return the sheet of ``record``: its sentences and numbers as they are shown."""
    return _SHEETS[type(record)](record)
