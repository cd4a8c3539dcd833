"""The records below a folder, each as one line of an index; a broken file hides no other."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from mezzo.errors import RecordError
from mezzo.records import AnyRecord, CompareRecord, Environment, RunRecord, read_record
from mezzo.report import formatting as fmt
from mezzo.report.index.sheet import IndexLine
from mezzo.report.pages import command_name
from mezzo.report.pages import page_of as said_by

RECORD, PAGE = "record.json", "report.html"
_NAME_LENGTH, _TEXT_LENGTH = 60, 160


def find_records(folder: Path) -> list[Path]:
    """Return the records below ``folder``; those below another record belong to its command and are left out. Links are not followed."""
    records = []
    for place, folders, files in os.walk(folder):
        if RECORD in files:
            records.append(Path(place) / RECORD)
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))
    return records


def page_of(path: Path) -> Path:
    """Return the path of the page of the record at ``path``."""
    return path.with_name(PAGE) if path.name == RECORD else path.with_suffix(".html")


def outdated(path: Path) -> bool:
    """Return whether the record at ``path`` has no page, or one that is older than the record."""
    try:
        return page_of(path).stat().st_mtime_ns < path.stat().st_mtime_ns
    except OSError:
        return True


def read_all(paths: Sequence[Path]) -> Iterator[tuple[Path, AnyRecord | RecordError]]:
    """Yield each record, or the error that says why it cannot be read: one broken file must not hide the others."""
    for path in paths:
        try:
            yield path, read_record(path)
        except RecordError as error:
            yield path, error


def entry_of(path: Path, record: AnyRecord | RecordError, folder: Path) -> IndexLine:
    """Return the line of one record."""
    place = path.parent.relative_to(folder).as_posix()
    shown = _short(place, _NAME_LENGTH)
    if isinstance(record, RecordError):
        why = _short(str(record).splitlines()[0].replace(repr(str(path)), path.name), _TEXT_LENGTH)
        empty: dict[str, Any] = dict.fromkeys(("date", "script", "kind", "policies", "device"), fmt.MISSING)
        return IndexLine(place=shown, link="", word="cannot be read", tone="bad", headline=why, **empty)
    said = said_by(record)
    run: Any = getattr(record, "run", record)
    environment: Environment = run.environment
    return IndexLine(
        place=shown,
        link=_address(page_of(path), folder),
        date=fmt.date_text(environment.date),
        when=environment.date,
        script=_short(PurePath(said.script).name or fmt.MISSING, _NAME_LENGTH),
        kind=command_name(record),
        policies=_short(", ".join(_policies(record)) or fmt.MISSING, _NAME_LENGTH),
        word=said.answer.word,
        tone=said.answer.tone,
        headline=_short(said.answer.sentence, _TEXT_LENGTH),
        device=_short(environment.gpu or environment.device, _NAME_LENGTH),
        losses=_losses(record),
    )


def _short(text: str, length: int) -> str:
    return fmt.shortened(fmt.clean(text), length=length)


def _address(page: Path, folder: Path) -> str:
    # In a name that is not UTF-8, surrogates stand for bytes; quoting the bytes themselves finds the file.
    return "/".join(quote(os.fsencode(part), safe="") for part in page.relative_to(folder).parts)


def _policies(record: AnyRecord) -> list[str]:
    if isinstance(record, CompareRecord):
        return [row.policy_shown for row in record.rows]
    policy = getattr(record, "policy", None) or getattr(getattr(record, "run", None), "policy", None)
    return [policy] if policy else []


def _losses(record: AnyRecord) -> dict[str, float]:
    if isinstance(record, CompareRecord):
        losses = {row.policy_shown: row.loss.value for row in record.rows if row.loss is not None}
    elif isinstance(record, RunRecord) and record.steps.loss:
        losses = {record.policy_shown: record.steps.loss[-1]}
    else:
        losses = {}
    return {policy: value for policy, value in losses.items() if math.isfinite(value)}
