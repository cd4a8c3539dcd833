"""An index of the records below a folder: a line each, the newest first, and the history of each script. A broken file hides no other."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from mezzo.errors import RecordError
from mezzo.records import AnyRecord, CompareRecord, Environment, RunRecord, read_record
from mezzo.report import formatting as fmt
from mezzo.report.charts import data
from mezzo.report.charts.data import Axis, Chart, Line
from mezzo.report.colours import policy_styles
from mezzo.report.pages import command_name
from mezzo.report.pages import page_of as said_by
from mezzo.report.sections import Fact, Headline

RECORD, PAGE = "record.json", "report.html"
_NAME_LENGTH, _TEXT_LENGTH = 60, 160
MOST_ROWS = 500  # some 600 bytes of the page each
_MOST_HISTORIES = 6
_MOST_POLICIES = 6


@dataclass(frozen=True, kw_only=True)
class IndexLine:
    """One record as a line of the index."""

    place: str
    """Its folder below the index."""
    link: str
    """The page's address, relative to the index; empty without one."""
    date: str
    script: str
    kind: str
    policies: str
    word: str
    tone: str
    headline: str
    device: str
    losses: dict[str, float] = field(default_factory=dict)
    """Final loss by policy."""
    when: str = ""
    """The date as in the record, by which entries are sorted."""


@dataclass(frozen=True, kw_only=True)
class History:
    """The records of one script, the oldest first."""

    script: str
    entries: list[IndexLine]
    chart: Chart | None


@dataclass(frozen=True, kw_only=True)
class IndexSheet:
    """The words and tables of an index, ready for any view."""

    title: str
    answer: Headline
    entries: list[IndexLine]
    """The newest first; at most MOST_ROWS."""
    num_older: int
    histories: list[History]
    environment: list[Fact] = field(default_factory=list)
    command: str = ""


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
    """Return whether the record at ``path`` is newer than its page, or has none."""
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


def index_sheet(entries: Sequence[IndexLine], folder: Path) -> IndexSheet:
    """Return the index of ``entries``."""
    newest_first = sorted(entries, key=lambda entry: (entry.when, entry.place), reverse=True)
    shown = newest_first[:MOST_ROWS]
    scripts: dict[str, list[IndexLine]] = {}
    for entry in reversed(newest_first):
        if entry.script != fmt.MISSING:
            scripts.setdefault(entry.script, []).append(entry)
    by_count = sorted(scripts.items(), key=lambda item: -len(item[1]))
    repeated = [(script, history) for script, history in by_count if len(history) > 1][:_MOST_HISTORIES]
    tones = [entry.tone for entry in entries]
    facts = [
        Fact(what="scripts", value=str(len(scripts))),
        Fact(what="good", value=str(tones.count("good"))),
        Fact(what="to look into", value=str(sum(tone in ("warn", "bad") for tone in tones))),
        Fact(what="open", value=str(tones.count("open"))),
    ]
    name = fmt.clean(folder.resolve().name or str(folder))
    return IndexSheet(
        title=f"Runs in {name}",
        answer=Headline(tone="quiet", word="", sentence=f"{fmt.plural(len(entries), 'record')} in {name}", facts=facts),
        entries=shown,
        num_older=len(newest_first) - len(shown),
        histories=[_history(number, script, history) for number, (script, history) in enumerate(repeated, 1)],
    )


def _history(number: int, script: str, entries: Sequence[IndexLine]) -> History:
    with_loss = [entry for entry in entries if entry.losses]
    kinds = [entry.kind for entry in with_loss]
    # Only the most frequent kind: the last loss of a run and the mean loss of a comparison do not belong in one line.
    kind_shown = max(kinds, key=kinds.count, default="")
    known = [entry for entry in with_loss if entry.kind == kind_shown]
    policies = list(dict.fromkeys(policy for entry in known for policy in entry.losses))[:_MOST_POLICIES]
    shown = list(entries[-MOST_ROWS // 10 :])
    if len(known) < 2:
        return History(script=script, entries=shown, chart=None)
    styles = policy_styles(policies)
    values = [v for entry in known for v in entry.losses.values()]
    lines = [
        Line(name=fmt.clean(p), style=styles[p], y=_without_gaps([entry.losses.get(p, math.nan) for entry in known]))
        for p in policies
    ]
    ends = ", ".join(f"{line.name} {fmt.number_text(line.y[-1])}" for line in lines if math.isfinite(line.y[-1]))
    chart = Chart(
        name=f"history{number}",
        title=f"Final loss of {script} under mezzo {kind_shown}",
        description=f"The final loss over {fmt.plural(len(known), 'record')}, from {known[0].date} to {known[-1].date}; now {ends}.",
        x=list(range(1, len(known) + 1)),
        last_x=len(known),
        x_axis=Axis(title="record, by date"),
        y_axis=Axis(title="final loss", kind=data.axis_kind(values)),
        lines=lines,
        layered=True,
        height=220,
        point_noun="record",
    )
    return History(script=script, entries=shown, chart=chart)


def _without_gaps(values: Sequence[float]) -> list[float]:
    """Return ``values`` with each gap filled with the value before it: a policy that some record lacks is still one line."""
    known = [place for place, value in enumerate(values) if math.isfinite(value)]
    filled: list[float] = []
    for place, value in enumerate(values):
        inside = bool(known) and known[0] < place < known[-1]
        filled.append(filled[-1] if inside and not math.isfinite(value) else value)
    return filled
