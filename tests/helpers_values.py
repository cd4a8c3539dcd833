"""What tests do with a value that may be missing, or of another kind."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from mezzo.records import AnyRecord, read_record

T = TypeVar("T")
R = TypeVar("R", bound=AnyRecord)


def existing(value: T | None) -> T:
    """Return a value that is there."""
    assert value is not None
    return value


def record_at(path: Path, kind: type[R]) -> R:
    """Return the record of this kind in a file."""
    record = read_record(path)
    assert isinstance(record, kind)
    return record
