"""Records as self-contained HTML files, which need neither the network nor other files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from mezzo.records import AnyRecord, CompareRecord
from mezzo.records.files import write_whole
from mezzo.report.figures import Plot
from mezzo.report.next_steps import NextStep, next_steps
from mezzo.report.together import together_sheet
from mezzo.report.views import VIEWS

_JSON = {"allow_nan": False, "separators": (",", ":")}


def render_html(record: AnyRecord) -> str:
    """Return ``record`` as one page."""
    view = VIEWS[record.kind]
    return _page(record.kind, view.sheet(record), view.plots(record), next_steps(record))


def write_html(record: AnyRecord, path: Path) -> None:
    """Write ``record`` as a page to ``path``, whole or not at all."""
    write_whole(render_html(record), path)


def write_together(records: Sequence[CompareRecord], path: Path) -> None:
    """Write several comparisons as one page to ``path``, whole or not at all."""
    write_whole(_page("together", together_sheet(records)), path)


def _page(kind: str, sheet: Any, plots: Sequence[Plot] = (), steps: Sequence[NextStep] = ()) -> str:
    drawn = {plot.name: plot.figure for plot in plots if plot.figure is not None}
    library = _plotly_js() if drawn else ""
    template = _environment().get_template(f"{kind}.html")
    return template.render(kind=kind, sheet=sheet, plots=plots, drawn=drawn, library=library, next_steps=steps)


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
    environment.filters["breakable"] = _breakable
    return environment


def _breakable(policy: str) -> Markup:
    # A long policy text wraps between fields, not inside a word.
    return Markup("<wbr>").join(escape(part) for part in re.split(r"(?<=[:=+.,])", policy))


@cache
def _plotly_js() -> Markup:
    # Read the file directly: importing plotly takes a second, and inlining its script does not need it.
    script = (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    return Markup(script.replace("</script", "<\\/script"))
