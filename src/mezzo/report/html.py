"""Records as self-contained HTML files, which need neither a network nor other files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from mezzo.records import AnyRecord
from mezzo.records.files import write_whole
from mezzo.report import formatting as fmt
from mezzo.report.charts.data import Chart, Drawn
from mezzo.report.charts.svg import hover_data, numbers_of, svg
from mezzo.report.colours import css_colours
from mezzo.report.index import IndexSheet
from mezzo.report.pages import command_name, page_of
from mezzo.report.sections import Charts, Page, Section, SourceCode, has_content
from mezzo.report.source import SourceLines, source_of

_NAMES = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d UTC|\S*\w-\w\S*)")
_UNBROKEN = 30
"""Letters of a longest word that stays on one line, also on a phone."""
_MOST_ROWS = 400
_JSON = {"allow_nan": False, "separators": (",", ":")}


def render_html(record: AnyRecord, *, typed: str = "") -> str:
    """Return ``record`` as one page; ``typed`` is the script that a person has just typed."""
    page = page_of(record)
    return _written(page, source_lines(page, typed=typed), command=command_name(record))


def source_lines(page: Page, *, typed: str = "") -> SourceLines:
    """Return the lines of code that a page shows; ``typed`` is the script that a person has just typed."""
    code = next((one for one in page.sections if isinstance(one, SourceCode)), None)
    return SourceLines() if code is None else source_of(code.run, code.lines, typed=typed)


def write_html(record: AnyRecord, path: Path, *, typed: str = "") -> None:
    """Write ``record`` as a page to ``path``, whole or not at all; ``typed`` is the script that a person has just typed."""
    write_whole(render_html(record, typed=typed), path)


def write_page(page: Page, path: Path) -> None:
    """Write the page of several records to ``path``, whole or not at all."""
    write_whole(_written(page, SourceLines(), command="together"), path)


def write_index(sheet: IndexSheet, path: Path) -> None:
    """Write an index of records as a page to ``path``, whole or not at all."""
    charts = [history.chart for history in sheet.histories if history.chart is not None]
    write_whole(_rendered("index.html", charts, page=sheet, command="index"), path)


def _written(page: Page, source: SourceLines, *, command: str) -> str:
    shown: list[Section | SourceCode | Drawn] = []
    for one in page.sections:
        if isinstance(one, Charts):
            shown += one.draw(source)
        elif isinstance(one, SourceCode) or (one.shown_in != "terminal" and not one.is_empty):
            shown.append(one)
    return _rendered("page.html", shown, page=page, sections=shown, source=source, command=command)


def _rendered(template: str, shown: Iterable[object], **values: Any) -> str:
    data = {chart.name: hover_data(chart) for chart in shown if isinstance(chart, Chart)}
    text = _environment().get_template(template).render(colours=Markup(css_colours()), data=data, **values)
    return fmt.without_controls(text)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mezzo.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = _JSON  # tojson also escapes <, > and & for a script element
    environment.filters |= {
        "breakable": _breakable,
        "whole": kept_whole,
        "svg": svg,
        "numbers": numbers_of,
        "heads": _heads,
    }
    environment.globals |= {"has_content": has_content, "MOST_ROWS": _MOST_ROWS}
    return environment


def _breakable(policy: str) -> Markup:
    # A long policy text wraps between fields, not inside a word.
    return Markup("<wbr>").join(escape(part) for part in re.split(r"(?<=[:=+.,])(?![ \d]|$)", policy))


def kept_whole(text: str) -> Markup:
    """Return a text whose dates and names with a hyphen (GPUs, files) stay on one line."""
    parts = [
        Markup('<span class="whole">{}</span>').format(part) if number % 2 and len(part) <= _UNBROKEN else escape(part)
        for number, part in enumerate(_NAMES.split(text))
    ]
    return Markup("").join(parts)


def _heads(heads: Sequence[str]) -> str:
    """Return the heads of a table as CSS variables, with which a narrow page labels the cells of each card."""
    return ";".join(f'--h{place}:"{_css_text(head)}"' for place, head in enumerate(heads, 1) if head)


def _css_text(text: str) -> str:
    # Everything except letters, digits and spaces is escaped, so that no text can end the string.
    return "".join(c if c.isalnum() or c == " " else f"\\{ord(c):x} " for c in text)
