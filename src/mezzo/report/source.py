"""The lines of code that a record names, with their text: read when the page is written, unless the file has changed since the run."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from mezzo.readable import as_path
from mezzo.records import RunRecord
from mezzo.report import formatting as fmt
from mezzo.secrets import hidden_text

_AROUND = 3
_MOST_LINES = 80
_MOST_BYTES = 4_000_000
_LONGEST_LINE = 200
_PLACE = re.compile(r"(.+):(\d+)")


@dataclass(frozen=True, kw_only=True)
class SourceLine:
    """One line of a file."""

    number: int
    text: str
    key: str = ""
    """Its anchor, if the record names the line."""
    notes: list[str] = field(default_factory=list)
    """What the record says about it."""


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """The named lines of one file, with those around them."""

    name: str
    parts: list[list[SourceLine]]
    missing: str = ""
    """Why there is no text; empty if there is."""


@dataclass(frozen=True, kw_only=True)
class SourceLines:
    """All lines that a record names."""

    files: list[SourceFile] = field(default_factory=list)
    keys: Mapping[str, str] = field(default_factory=dict)
    """The anchor of each line, by ``file:line`` as in the record."""


def source_of(run: RunRecord, named: Iterable[tuple[str, str]], *, typed: str = "") -> SourceLines:
    """Return lines of code, of files below the working folder.

    Args:
        run: its record may be somebody else's, so that no file is read because of what it says.
        named: lines as ``file:line``, each with what the record says about it.
        typed: the script that a person has just typed, whose folder is read, too.
    """
    notes: dict[str, list[str]] = {}
    for place, note in named:
        if _PLACE.fullmatch(place) and note not in notes.setdefault(place, []):
            notes[place].append(note)
    by_file: dict[str, dict[int, str]] = {}
    keys: dict[str, str] = {}
    for place in list(notes)[:_MOST_LINES]:
        match = _PLACE.fullmatch(place)
        assert match is not None
        keys[place] = f"line-{len(keys) + 1}"
        by_file.setdefault(match[1], {})[int(match[2])] = place
    roots = [Path.cwd(), *([Path(typed).resolve().parent] if typed else [])]
    files = [_file(name, numbers, keys, notes, run, roots) for name, numbers in by_file.items()]
    return SourceLines(files=files, keys=keys)


def _file(
    name: str,
    numbers: Mapping[int, str],
    keys: Mapping[str, str],
    notes: Mapping[str, list[str]],
    run: RunRecord,
    roots: Sequence[Path],
) -> SourceFile:
    shown = fmt.clean(name)
    text, missing = _text(name, run, roots)
    if missing:
        bare = [
            [SourceLine(number=n, text="", key=keys[place], notes=[fmt.clean(v) for v in notes[place]])]
            for n, place in sorted(numbers.items())
        ]
        return SourceFile(name=shown, parts=bare, missing=missing)
    lines = [line.rstrip("\n") for line in io.StringIO(text, newline=None)]  # str.splitlines also splits at form feeds
    wanted = sorted(
        {n for number in numbers for n in range(number - _AROUND, number + _AROUND + 1) if 1 <= n <= len(lines)}
    )
    parts: list[list[SourceLine]] = []
    for number in wanted:
        place = numbers.get(number, "")
        code = fmt.shortened(fmt.clean_line(hidden_text(lines[number - 1])), length=_LONGEST_LINE)
        line = SourceLine(
            number=number, text=code, key=keys.get(place, ""), notes=[fmt.clean(v) for v in notes.get(place, [])]
        )
        if parts and parts[-1][-1].number == number - 1:
            parts[-1].append(line)
        else:
            parts.append([line])
    return SourceFile(name=shown, parts=parts)


def _text(name: str, run: RunRecord, roots: Sequence[Path]) -> tuple[str, str]:
    """Return the text of a file, or why it is not shown."""
    try:
        folder = as_path(run.environment.folder or ".")
        path, script = (folder / as_path(name)).resolve(), (folder / as_path(run.script)).resolve()
        if path.suffix != ".py" or not any(map(path.is_relative_to, roots)):
            return "", "it is not a Python file below the folder in which this page was made"
        if path.stat().st_size > _MOST_BYTES:
            return "", "the file is too large"
        data = path.read_bytes()
        if path == script and run.script_sha256:
            unchanged = hashlib.sha256(data).hexdigest() == run.script_sha256
        else:
            unchanged = path.stat().st_mtime <= _ended_at_s(run)
    except (OSError, ValueError):
        return "", "the file cannot be read from here"
    if not unchanged:
        return "", "the file has changed since the run"
    return data.decode("utf-8", errors="replace"), ""


def _ended_at_s(run: RunRecord) -> float:
    if run.started_at_s is not None:
        return run.started_at_s + run.duration_s
    try:
        return datetime.fromisoformat(run.environment.date).timestamp()
    except ValueError:
        return 0.0
