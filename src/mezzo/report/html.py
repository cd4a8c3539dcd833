"""Records as self-contained HTML files, which need neither a network nor other files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from mezzo.records import AnyRecord, AuditRecord, CompareRecord, DiagnoseRecord, RunRecord
from mezzo.records.files import write_whole
from mezzo.report import formatting as fmt
from mezzo.report.charts import loss, memory, modules, predicted, ranges, steps
from mezzo.report.charts.data import Chart, Drawn
from mezzo.report.charts.steps import StepTimes
from mezzo.report.charts.svg import hover_data, svg
from mezzo.report.charts.table import numbers_of
from mezzo.report.colours import Style, css_colours, styles_of
from mezzo.report.index.sheet import IndexSheet
from mezzo.report.next_steps import NextStep, next_steps
from mezzo.report.sheets.answers import Headline
from mezzo.report.sheets.predict import real_gpus_sheet
from mezzo.report.sheets.together import together_sheet
from mezzo.report.source import SourceLines, module_places, source_of
from mezzo.report.views import VIEWS, command_name

_NAMES = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d UTC|\S*\w-\w\S*)")
_UNBROKEN = 30
"""Letters of a longest word that stays on one line, also on a phone."""
_JSON = {"allow_nan": False, "separators": (",", ":")}


def render_html(record: AnyRecord, *, typed: str = "") -> str:
    """Return ``record`` as one page; ``typed`` is the script that a person has just typed."""
    view = VIEWS[record.kind]
    sheet, source = view.sheet(record), source_of(record, typed=typed)
    places = module_places(record, source) if isinstance(record, AuditRecord) else {}
    charts = charts_of(record, places=places)
    answer = view.answer(record, sheet)
    return _page(
        record.kind, sheet, charts, answer=answer, command=command_name(record), source=source, steps=next_steps(record)
    )


def write_html(record: AnyRecord, path: Path, *, typed: str = "") -> None:
    """Write ``record`` as a page to ``path``, whole or not at all; ``typed`` is the script that a person has just typed."""
    write_whole(render_html(record, typed=typed), path)


def write_together(records: Sequence[CompareRecord], path: Path) -> None:
    """Write several comparisons as one page to ``path``, whole or not at all."""
    write_whole(_page("together", together_sheet(records), answer=Headline(tone="quiet", word="together")), path)


def write_index(sheet: IndexSheet, path: Path) -> None:
    """Write an index of records as a page to ``path``, whole or not at all."""
    charts = [history.chart for history in sheet.histories if history.chart is not None]
    write_whole(_page("index", sheet, charts, answer=Headline(tone="quiet", word="")), path)


def _page(
    kind: str,
    sheet: Any,
    charts: Iterable[Drawn] = (),
    *,
    answer: Headline,
    command: str = "",
    source: SourceLines | None = None,
    steps: Sequence[NextStep] = (),
) -> str:
    charts = list(charts)
    template = _environment().get_template(f"{kind}.html")
    page = template.render(
        command=command or kind,
        colours=Markup(css_colours()),
        sheet=sheet,
        charts=charts,
        data={chart.name: hover_data(chart) for chart in charts if isinstance(chart, Chart)},
        answer=answer,
        source=source or SourceLines(),
        steps=steps,
    )
    return fmt.without_controls(page)


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
    environment.filters["real_gpus"] = real_gpus_sheet
    return environment


def _breakable(policy: str) -> Markup:
    # A long policy text wraps between fields, not inside a word.
    return Markup("<wbr>").join(escape(part) for part in re.split(r"(?<=[:=+.,])", policy))


def kept_whole(text: str) -> Markup:
    """Return a text whose dates and names with a hyphen, such as those of GPUs and files, stay on one line."""
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


# --- The charts of each kind of record, in reading order ------------------------------------------------------------------------


def compare_charts(record: CompareRecord) -> list[Drawn]:
    """Return the charts of a comparison in reading order."""
    styles = compare_styles(record)
    trained = [run for run in record.runs if run.error is None]
    timed = [
        StepTimes(
            policy=row.policy_shown,
            style=styles[row.policy_shown],
            times_ms=[ms for run in trained if run.compared_as == row.compared_as for ms in run.steps.warm_ms],
            emulated=row.emulated,
        )
        for row in record.rows
    ]
    return [
        *loss.loss_charts(record.runs, styles=styles),
        *loss.difference_charts(record, styles=styles),
        steps.scale_chart(record.runs, styles=styles),
        memory.memory_bars({row.policy_shown: row.memory for row in record.rows}, styles=styles),
        steps.time_boxes(timed),
    ]


def compare_styles(record: CompareRecord) -> dict[str, Style]:
    """Return the style of each policy of a comparison, in the order of its rows."""
    return styles_of([*record.rows, *record.runs])


def run_charts(record: RunRecord) -> list[Drawn]:
    """Return the charts of one run."""
    styles = styles_of([record])
    style = styles[record.policy_shown]
    return [
        *loss.loss_charts([record], styles=styles),
        steps.scale_chart([record], styles=styles),
        steps.norm_chart(record, style=style),
        steps.time_chart(record, style=style),
        memory.memory_bars({record.policy_shown: record.memory}, styles=styles),
    ]


def diagnose_charts(record: DiagnoseRecord) -> list[Drawn]:
    """Return the steps of the run that was diagnosed."""
    styles = styles_of([record.run])
    charts = [*loss.loss_charts([record.run], styles=styles), steps.scale_chart([record.run], styles=styles)]
    return [chart for chart in charts if chart.form != "nothing"]


def charts_of(record: Any, *, places: Mapping[str, str]) -> list[Drawn]:
    """Return the charts of a record of any kind; ``places`` maps modules to the anchors of their source lines."""
    if record.kind == "audit":
        return [modules.phase_bars(record), modules.module_tree(record, places)]
    makers: dict[str, Callable[[Any], list[Drawn]]] = {
        "compare": compare_charts,
        "check": lambda check: compare_charts(check.comparison) if check.comparison else [],
        "run": run_charts,
        "diagnose": diagnose_charts,
        "ranges": lambda found: [ranges.exponents_chart(found), ranges.scales_chart(found)],
        "fallback": lambda search: [modules.error_tree(search)],
        "predict": predicted.predict_charts,
    }
    maker = makers.get(record.kind)
    return maker(record) if maker else []
