"""Records in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from mezzo.records import AnyRecord, CompareRecord
from mezzo.report.next_steps import next_steps
from mezzo.report.sheets.together import together_sheet
from mezzo.report.terminal import print_ending, print_framed, print_together
from mezzo.report.views import VIEWS


def render(record: AnyRecord, console: Console, *, files: str = "", verbose: bool = True) -> None:
    """Print ``record`` to ``console``: its answer, then what to do next, and at the end the line ``files`` about its files.

    Without ``verbose``, the tables behind the answer are left to the page.
    """
    view = VIEWS[record.kind]
    steps = next_steps(record)
    if view.framed:
        print_framed(view.sheet(record), view.body, view.details, console, files=files, steps=steps, verbose=verbose)
    else:
        view.body(view.sheet(record), console)
        print_ending(console, files=files, steps=steps)


def render_together(records: Sequence[CompareRecord], console: Console) -> None:
    """Print several comparisons as one table."""
    print_together(together_sheet(records), console)
