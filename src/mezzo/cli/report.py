"""``mezzo report``: existing records, as text and as pages."""

from __future__ import annotations

import os
import shlex
from difflib import get_close_matches
from itertools import chain, count
from pathlib import Path
from typing import Annotated

import typer

from mezzo.cli import completion, options, results
from mezzo.cli.folders import check_folder
from mezzo.errors import UsageError


def report(
    records: Annotated[
        list[Path],
        typer.Argument(
            metavar="RECORD...", autocompletion=completion.record, help="record.json files written by any command."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write each page there instead of beside its record.")
    ] = None,
    log_to: options.LogTo = None,
    as_json: options.Json = False,
) -> None:
    """Show records in the terminal and write each as a self-contained HTML page; several comparisons also share one table."""
    from mezzo.records import CompareRecord, read_record
    from mezzo.report.html import write_html, write_together
    from mezzo.report.text import render, render_together

    if as_json and len(records) > 1:
        raise UsageError(
            f"--json takes one record; {len(records)} were given",
            hint=f"type: mezzo report --json {shlex.quote(str(records[0]))}, and the same for each of the others",
        )
    for path in records:
        _check(path)
    check_folder(out, "--out")
    found = list(zip(_pages(records, out), map(read_record, records), strict=True))
    for page, record in found:
        write_html(record, page)
    compared = [record for _, record in found if isinstance(record, CompareRecord)]
    folder = out or Path(os.path.commonpath([path.resolve().parent for path in records]))
    together = len(compared) > 1 and not as_json
    if together:
        write_together(compared, folder / "together.html")
    with results.readers_may_go():
        screen = results.console()
        for page, record in found:
            if as_json:
                print(record.model_dump_json(indent=1))
                continue
            render(record, screen, files=f"report: {page}")
        if together:
            render_together(compared, screen)
            screen.print(f"report: {folder / 'together.html'}", soft_wrap=True)
    for path, (page, record) in zip(records, found, strict=True):
        results.track(record, path, page, log_to)


def _pages(records: list[Path], out: Path | None) -> list[Path]:
    """Return the path of each record's page: beside the record, or in ``out`` under the name of the record's folder."""
    pages: list[Path] = []
    for path in records:
        if out is None:
            pages.append(path.with_name("report.html") if path.name == "record.json" else path.with_suffix(".html"))
        else:
            name = path.resolve().parent.name
            names = chain([name], (f"{name}-{number}" for number in count(2)))
            pages.append(next(page for page in (out / f"{name}.html" for name in names) if page not in pages))
    return pages


def _check(path: Path) -> None:
    """Refuse a path that is not a file, and suggest the record that may have been meant."""
    if path.is_file():
        return
    inside = sorted(path.glob("record.json")) or sorted(path.glob("*/record.json"))
    beside = [str(p) for folder in (path.parent, path.parent.parent) for p in sorted(folder.glob("*/record.json"))]
    near = [str(p) for p in inside[-1:]] or get_close_matches(str(path), beside, n=1)
    hint = f"type: mezzo report {shlex.quote(near[0])}" if near else "pass the record.json that a mezzo command wrote"
    raise UsageError(f"{path} is a folder" if path.is_dir() else f"there is no record {str(path)!r}", hint=hint)
