"""The page of any record, and what the pages of several commands share."""

from __future__ import annotations

from importlib import import_module

from mezzo.records import AnyRecord, RunRecord
from mezzo.report.sections import Page


def page_of(record: AnyRecord) -> Page:
    """Return what ``record`` says; only the page of its command is imported."""
    page: Page = import_module(f"mezzo.commands.{record.kind}.page").page(record)
    return page


def command_name(record: AnyRecord) -> str:
    """Return the command that made a record, as it is typed."""
    if isinstance(record, RunRecord) and record.watched:
        return "watch"
    return record.kind.replace("_", "-")
