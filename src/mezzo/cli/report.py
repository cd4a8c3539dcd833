"""``mezzo report``: records that were written before, as text and as a page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from mezzo.cli import options


def report(
    records: Annotated[list[Path], typer.Argument(metavar="RECORD...", help="record.json files of any command.")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write each page there instead of beside its record.")
    ] = None,
    tensorboard: options.TensorBoard = None,
    as_json: options.Json = False,
) -> None:
    """Show records in the terminal and write each as one self-contained HTML page; several comparisons also in one table."""
    from mezzo.records import CompareRecord, read_record
    from mezzo.report.html import write_html, write_together
    from mezzo.report.tensorboard import write_events
    from mezzo.report.text import render, render_together

    screen = options.console()
    found = [(path, read_record(path)) for path in records]
    for path, record in found:
        page = path.with_name("report.html") if out is None else out / f"{path.resolve().parent.name}.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        write_html(record, page)
        if tensorboard is not None:
            write_events(record, tensorboard if len(found) == 1 else tensorboard / path.resolve().parent.name)
        if as_json:
            print(record.model_dump_json(indent=1))
        else:
            render(record, screen)
            screen.print(f"report: {page}", soft_wrap=True)
    compared = [record for _, record in found if isinstance(record, CompareRecord)]
    if len(compared) > 1 and not as_json:
        folder = out or Path(os.path.commonpath([path.resolve().parent for path in records]))
        write_together(compared, folder / "together.html")
        render_together(compared, screen)
        screen.print(f"report: {folder / 'together.html'}", soft_wrap=True)
