"""A record for other programs: JUnit XML for test reports, SARIF 2.1.0 for code scanning, Markdown for a job's summary.

SARIF: OASIS, Static Analysis Results Interchange Format 2.1.0. Paths are relative to the repository, as code scanning wants them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from mezzo.errors import UsageError
from mezzo.records import AnyRecord, Finding
from mezzo.records.files import write_whole
from mezzo.report import formatting as fmt
from mezzo.report.pages import cases_of, command_name, page_of
from mezzo.report.sections import Cell, Code, Fact, FactTable, Grid, JudgedCase, Page, Paragraph, Section
from mezzo.version import VERSION

_SARIF_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS = {"error": "error", "warning": "warning", "info": "note", "": "note"}
_MOST_TABLE_ROWS = 40


def check_export(paths: Sequence[Path], *, records: int) -> None:
    """Refuse files whose ending names no format, and files for several records.

    Raises:
        UsageError: it says which endings are allowed.
    """
    for path in paths:
        if path.suffix not in EXPORTS:
            raise UsageError(
                f"--export {str(path)!r} ends in {path.suffix or 'nothing'!r}; allowed: {', '.join(EXPORTS)}",
                hint="JUnit is .xml, code scanning .sarif, a table for people .md",
            )
    if paths and records > 1:
        raise UsageError(f"--export takes one record; {records} were given", hint="type the command for each record")


def export(record: AnyRecord, path: Path) -> None:
    """Write a record to a file in the format that its ending names."""
    write_whole(EXPORTS[path.suffix](record), path)


# --- JUnit ---------------------------------------------------------------------------------------------------------------------------


def junit(record: AnyRecord) -> str:
    """Return a record as JUnit XML: a test case for each thing that it judges."""
    page, name = page_of(record), f"mezzo {command_name(record)}"
    cases = page.cases or [_case_of(page, name), *cases_of(_findings(record))]
    counts = {
        "tests": str(len(cases)),
        "failures": str(sum(case.outcome == "failed" for case in cases)),
        "errors": "0",
        "skipped": str(sum(case.outcome == "skipped" for case in cases)),
    }
    root = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(root, "testsuite", {"name": name, **counts, "time": f"{_seconds(record):.3f}"})
    for case in cases:
        file, line = _place(case.line)
        where = {"file": file, "line": str(line)} if file else {}
        element = ElementTree.SubElement(
            suite,
            "testcase",
            {"classname": f"{name}.{page.script}" if page.script else name, "name": case.name, **where},
        )
        if case.outcome == "failed":
            ElementTree.SubElement(element, "failure", {"message": case.message}).text = _with_line(case, file, line)
        elif case.outcome == "skipped":
            ElementTree.SubElement(element, "skipped", {"message": case.message})
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + _valid(ElementTree.tostring(root, encoding="unicode")) + "\n"


def _case_of(page: Page, name: str) -> JudgedCase:
    """Return the answer of a page as a case."""
    outcome = {"bad": "failed", "warn": "failed", "open": "skipped"}.get(page.answer.tone, "passed")
    message = " ".join(filter(None, [page.answer.sentence, page.answer.detail, page.answer.error]))
    return JudgedCase(name=name, outcome=outcome, message=message)  # type: ignore[arg-type]


def _with_line(case: JudgedCase, file: str, line: int) -> str:
    return f"{file}:{line}: {case.message}" if file and line else case.message


def _seconds(record: AnyRecord) -> float:
    return float(getattr(record, "duration_s", 0.0) or 0.0)


def _valid(text: str) -> str:
    """Return a text without the characters that XML cannot have."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)


# --- SARIF ---------------------------------------------------------------------------------------------------------------------------


def sarif(record: AnyRecord) -> str:
    """Return the findings of a record as SARIF."""
    findings = list(_findings(record))
    rules = {finding.code: finding for finding in findings}
    new: Sequence[str] | None = getattr(record, "new_findings", None)
    driver = {
        "name": "mezzo",
        "version": VERSION,
        "rules": [
            {
                "id": code,
                "shortDescription": {"text": _plain(one.title)},
                "help": {"text": _plain(one.fix or one.title)},
            }
            for code, one in rules.items()
        ],
    }
    script = _script(record)
    results = [result for one in findings for result in _results(one, [*rules].index(one.code), script=script, new=new)]
    data = {
        "$schema": _SARIF_SCHEMA,
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}],
    }
    return json.dumps(data, indent=1) + "\n"


def _findings(record: Any) -> Iterator[Finding]:
    """Yield the findings of a record, of its run or of its runs, each once."""
    runs = [getattr(record, "run", None), *(getattr(record, "runs", None) or [])]
    seen: set[tuple[str, ...]] = set()
    for holder in (record, *runs):
        for finding in getattr(holder, "located_findings", None) or getattr(holder, "findings", None) or []:
            key = (finding.code, *finding.modules)
            if key not in seen:
                seen.add(key)
                yield finding


def _script(record: Any) -> str:
    run = getattr(record, "run", None) or next(iter(getattr(record, "runs", None) or []), record)
    return str(getattr(run, "script", ""))


def _results(finding: Finding, rule: int, *, script: str, new: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    """Yield a result for each line of a finding; for one without lines, a result for the script."""
    text = ". ".join(filter(None, [finding.title, finding.detail, f"Fix: {finding.fix}" if finding.fix else ""]))
    places = [place for line in finding.lines if (place := _place(line))[0]] or [_place(script)]
    shown = [{"physicalLocation": _location(*place)} for place in places if place[0]]
    state = {} if new is None else {"baselineState": "new" if finding.code in new else "unchanged"}
    digest = hashlib.sha256("\n".join([finding.code, *finding.modules]).encode()).hexdigest()
    for locations in [[one] for one in shown] or [[]]:
        yield {
            "ruleId": finding.code,
            "ruleIndex": rule,
            "level": _LEVELS[finding.severity],
            "message": {"text": _plain(text)},
            "locations": locations,
            "partialFingerprints": {"mezzoCodeAndModules/v1": digest},
            **state,
        }


def _location(file: str, line: int) -> dict[str, Any]:
    artifact = {"artifactLocation": {"uri": quote(file), "uriBaseId": "%SRCROOT%"}}
    return {**artifact, "region": {"startLine": line}} if line else artifact


def _place(text: str) -> tuple[str, int]:
    """Return the file, relative to the repository, and the line of ``file:line``; an empty file if it lies elsewhere."""
    name, _, number = text.rpartition(":")
    if not number.isdecimal():
        name, number = text, "0"
    path, root = Path(name).absolute(), _root()
    is_file = bool(name) and path.is_relative_to(root) and path.is_file()
    return (path.relative_to(root).as_posix() if is_file else ""), int(number)


def _root() -> Path:
    """Return the repository's folder, or the current one outside a repository."""
    here = Path.cwd()
    return next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)


def _plain(text: str) -> str:
    return fmt.clean(text)


# --- Markdown ------------------------------------------------------------------------------------------------------------------------


def markdown(record: AnyRecord) -> str:
    """Return what a record says as Markdown: the answer, its tables, and what to type next."""
    page = page_of(record)
    lines = [
        f"### {_cell(page.answer.sentence)}",
        "",
        *filter(None, [_cell(page.answer.detail), _cell(page.answer.error)]),
    ]
    for one in page.sections:
        if isinstance(one, Section) and one.shown_in != "page" and not one.details and not one.is_empty:
            lines += ["", f"#### {_cell(f'{one.code} {one.title}'.strip())}" if one.title else "", *_blocks(one)]
    if page.steps:
        lines += ["", f"Next: {_cell(page.steps[0].why)}", "", "```", page.steps[0].command, "```"]
    return "\n".join(lines) + "\n"


def _blocks(section: Section) -> Iterator[str]:
    for block in section.blocks:
        if isinstance(block, Grid):
            yield from ["", *_table(block.heads, [[*map(_text, row)] for row in block.rows])]
        elif isinstance(block, FactTable):
            yield from ["", *_table(("", "", ""), [_fact(fact) for fact in block.rows])]
        elif isinstance(block, Paragraph):
            yield from ["", _cell(block.text)]
        elif isinstance(block, Code):
            yield from ["", "```", block.text, "```"]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if rows:
        yield f"| {' | '.join(map(_cell, heads))} |"
        yield "|" + "---|" * len(heads)
        yield from (f"| {' | '.join(map(_cell, row))} |" for row in rows[:_MOST_TABLE_ROWS])
        if len(rows) > _MOST_TABLE_ROWS:
            yield f"| and {len(rows) - _MOST_TABLE_ROWS} more {'|' * len(heads)}"


def _text(cell: str | Cell) -> str:
    return cell if isinstance(cell, str) else ", ".join(filter(None, [cell.text, *cell.below]))


def _fact(fact: Fact) -> list[str]:
    return [fact.what, fact.value, fact.reason]


def _cell(text: str) -> str:
    """Return a text in which nothing is Markdown or HTML."""
    return re.sub(r"([\\`*_{}\[\]<>|#~])", r"\\\1", " ".join(text.split()))


EXPORTS: dict[str, Callable[[AnyRecord], str]] = {".xml": junit, ".sarif": sarif, ".md": markdown}
"""By the ending of a file."""
