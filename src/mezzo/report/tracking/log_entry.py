"""A record as a tracker logs it: its entry, its text, its files and its name."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from rich.console import Console

from mezzo.records import AnyRecord
from mezzo.report.log_entries import LogEntry
from mezzo.report.terminal import render

_TEXT_WIDTH = 110


def log_entry(record: AnyRecord) -> LogEntry:
    """Return what is logged of ``record``, as its command says."""
    entry: LogEntry = import_module(f"mezzo.commands.{record.kind}.page").log_entry(record)
    return entry


def text_of(record: AnyRecord) -> str:
    """Return a record as the terminal shows it."""
    printed = io.StringIO()
    render(record, Console(file=printed, width=_TEXT_WIDTH, highlight=False))
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


# --- The files of a record that is logged, and the name that a tracker shows for it ---------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrackedRecord:
    """A record on disk and its page."""

    record: Path
    page: Path

    @property
    def folder(self) -> Path:
        """The folder of the record."""
        return self.record.parent

    @property
    def name(self) -> str:
        """The name of the record's folder, which is unique to a command; a rank's folder is prefixed with rank 0's."""
        folder = self.folder.resolve()
        name = f"{folder.parent.name}-{folder.name}" if re.fullmatch(r"rank\d+", folder.name) else folder.name
        return name if self.record.name == "record.json" else f"{name}-{self.record.stem}"
