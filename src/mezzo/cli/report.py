"""``mezzo report``: records that were written before, as text and as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mezzo.cli import options


def report(
    records: Annotated[list[Path], typer.Argument(metavar="RECORD...", help="record.json files of any command.")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write each page there instead of beside its record.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show records in the terminal and write each as one self-contained HTML page."""
    from mezzo.records import read_record
    from mezzo.report.html import write_html
    from mezzo.report.text import render

    screen = options.console()
    for path, record in [(path, read_record(path)) for path in records]:
        page = path.with_name("report.html") if out is None else out / f"{path.resolve().parent.name}.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        write_html(record, page)
        if as_json:
            print(record.model_dump_json(indent=1))
        else:
            render(record, screen)
            screen.print(f"report: {page}", soft_wrap=True)
