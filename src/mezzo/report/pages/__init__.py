"""What each kind of record says, as a page: one file for each kind."""

from __future__ import annotations

from importlib import import_module

from mezzo.records import AnyRecord, RunRecord
from mezzo.report.sections import Page


def page_of(record: AnyRecord) -> Page:
    """Return what ``record`` says; only the file of its kind is imported."""
    page: Page = import_module(f"mezzo.report.pages.{record.kind}").page(record)
    return page


def command_name(record: AnyRecord) -> str:
    """Return the command that made a record, as it is typed."""
    if isinstance(record, RunRecord) and record.watched:
        return "watch"
    return record.kind.replace("_", "-")
