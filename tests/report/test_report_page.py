"""The plots and the page: every mark in its place, all text only text, nothing loaded from outside."""

from __future__ import annotations

import ast
import json
import math
import re
import sys
from pathlib import Path

import pytest

import mezzo.report
import record_builders as build
from mezzo.records import CompareRecord, DoctorRecord, Memory, RunRecord, Steps
from mezzo.report import bars, curves, figures, sheets
from mezzo.report.html import render_html, write_html

NAN, INF = float("nan"), float("inf")
HOSTILE = "<script>alert(1)</script></script><!--%{x}<b>&amp;\x1b[31m\"'"
SIX_MB = 6_000_000


def without_library(page: str) -> str:
    longest = max(re.findall(r"<script>.*?</script>", page, flags=re.DOTALL), key=len, default="")
    return page.replace(longest, "") if len(longest) > 1_000_000 else page


def figures_in(page: str) -> dict[str, dict[str, list[dict[str, object]]]]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


# Figures


def test_figures_follow_plotly_schema() -> None:
    from plotly.graph_objects import Figure  # slow to import, and only a test needs it

    fixed = [*figures.compare_plots(build.compare_record()), *figures.compare_plots(build.emulated_record())]
    for plot in fixed:
        assert plot.figure is not None
        Figure(plot.figure)  # raises on a property that plotly does not know


def test_one_legend_entry_a_policy_toggles_all_its_seeds() -> None:
    figure = figures.compare_plots(build.compare_record())[0].figure
    assert figure is not None
    lines = [t for t in figure["data"] if t["mode"] == "lines"]
    assert len(lines) == 12
    assert [t["name"] for t in lines if t["showlegend"]] == ["fp32", "bf16", "fp16", "fp16-pure"]
    assert {(t["legendgroup"], t["line"]["color"]) for t in lines} == set(
        figures.compare_colours(build.compare_record()).items()
    )


def test_losses_that_are_not_finite_are_marked_inside_the_frame() -> None:
    record = build.compare_record()
    plot = figures.compare_plots(record)[0]
    assert plot.figure is not None
    crosses = [t for t in plot.figure["data"] if t["mode"] == "markers+text"]
    assert [t["x"] for t in crosses] == [[121], [126], [131]]
    assert crosses[0]["text"] == ["NaN"]
    assert crosses[0]["hovertext"] == ["loss is not finite at steps 121 to 200, first NaN"]
    assert all(y < plot.figure["layout"]["yaxis"]["range"][1] for t in crosses for y in t["y"])
    assert "A cross marks where a loss stopped being finite." in plot.caption


def test_loss_that_was_never_finite_is_marked() -> None:
    run = build.run_record(steps=Steps(loss=[NAN, NAN, INF]))
    figure = curves.loss_figure([run], colours={"fp16": "#123456"})
    assert figure is not None
    assert figure["data"][0]["y"] == [None, None, None]
    assert (figure["data"][1]["x"], figure["data"][1]["y"]) == ([1], [0.0])


def test_wide_losses_get_a_logarithmic_axis() -> None:
    run = build.run_record(steps=Steps(loss=[100.0, 10.0, 0.01]))
    figure = curves.loss_figure([run], colours={"fp16": "#123456"})
    assert figure is not None
    assert figure["layout"]["yaxis"]["type"] == "log"


def test_scale_is_a_staircase_in_powers_of_two_with_skips() -> None:
    figure = curves.scale_figure([build.run_record()], colours={"fp16": "#123456"})
    assert figure is not None
    line, skips = figure["data"]
    assert (line["x"], line["y"]) == ([1, 2, 101, 200], [15.0, 14.0, 13.0, 13.0])
    assert skips["x"] == [1, 2, 101]
    assert figure["layout"]["yaxis"]["range"] == [12, 16]


def test_nothing_to_draw_says_so() -> None:
    record = build.run_record(steps=Steps(), memory=Memory())
    plots = figures.run_plots(record)
    assert [plot.figure for plot in plots] == [None] * 4
    assert [plot.caption for plot in plots] == [
        "No run recorded a loss.",
        "No loss scale was used.",
        "Memory was not measured.",
        "No step was timed.",
    ]
    assert "No run recorded a loss." in render_html(record)


def test_memory_bars_share_a_unit_and_show_the_allocator_peak() -> None:
    gib = 1024**3
    memory = Memory(parameters_bytes=gib, activations_bytes=gib // 2, cuda_allocated_bytes=2 * gib)
    figure = bars.memory_figure({"fp32": memory, "bf16": Memory(parameters_bytes=gib // 4)})
    assert figure is not None
    assert [t["name"] for t in figure["data"]] == [*sheets.memory_kinds(memory), "peak allocated"]
    assert figure["data"][0]["x"] == [1.0, 0.25]
    assert figure["layout"]["xaxis"]["title"]["text"] == "GiB"


def test_emulated_policies_get_words_in_place_of_a_box() -> None:
    times = figures.compare_plots(build.emulated_record())[3].figure
    assert times is not None
    assert [trace["name"] for trace in times["data"]] == ["fp32"]
    notes = [note["text"] for note in times["layout"]["annotations"]]
    assert notes == ["emulated: says nothing about a GPU"] * 3


# The page


def hostile_compare() -> CompareRecord:
    rows = build.compare_rows()
    rows[1] = rows[1].model_copy(update={"policy": HOSTILE, "reason": HOSTILE})
    run = build.run_record(HOSTILE, script=HOSTILE, error=HOSTILE, command=["mezzo", HOSTILE])
    runs = [run, build.run_record("fp32")]
    cpu = build.environment(cpu=HOSTILE)
    return build.compare_record(rows=rows, runs=runs, environment=cpu, baseline=HOSTILE)


@pytest.mark.parametrize(
    "record",
    [
        hostile_compare(),
        build.run_record(HOSTILE, script=HOSTILE, error=HOSTILE, command=[HOSTILE]),
        build.doctor_record().model_copy(update={"environment": build.environment(os=HOSTILE)}),
    ],
    ids=["compare", "run", "doctor"],
)
def test_hostile_text_is_only_text(record: RunRecord | CompareRecord | DoctorRecord) -> None:
    page = without_library(render_html(record))
    assert "<script>alert" not in page
    assert "</script></script>" not in page
    assert "\x1b" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert page.count("<script") == page.count("</script>")


def test_hostile_names_in_plots_are_escaped_for_plotly() -> None:
    figure = figures_in(render_html(hostile_compare()))["loss"]
    names = [str(trace["name"]) for trace in figure["data"]]
    assert names
    assert not any("<" in name for name in names)
    assert not any("%{x}" in str(t["hovertemplate"]).split("<extra>")[1] for t in figure["data"])


@pytest.mark.parametrize("record", [build.compare_record(), build.run_record(), build.doctor_record()])
def test_page_is_self_contained(record: RunRecord | CompareRecord | DoctorRecord) -> None:
    page = render_html(record)
    own = without_library(page)
    assert len(page.encode()) < SIX_MB
    assert not re.search(r"https?://|@import|url\(|\bimport\(|<link|<img|<iframe|\bsrc=|\bhref=", own)
    assert "default-src 'none'" in own
    assert page.count("prefers-color-scheme: dark") >= 1


def test_page_of_many_long_runs_stays_small() -> None:
    record = build.compare_record(num_seeds=10, num_steps=3000)
    page = render_html(record)
    assert len(page.encode()) < SIX_MB
    points = sum(len(t["x"]) for t in figures_in(page)["loss"]["data"])  # type: ignore[arg-type]
    assert points <= 26_000


def test_page_has_the_verdict_before_the_curves_and_the_command_last() -> None:
    page = without_library(render_html(build.compare_record()))
    order = [
        "bf16 trains like fp32",
        'class="badge good">equivalent',
        'data-plot="loss"',
        'data-plot="scale"',
        'data-plot="memory"',
        'data-plot="times"',
        "Effective formats",
        "<details>\n<summary>What bf16 does",
        "<h2>Environment",
        "mezzo compare --policies",
    ]
    places = [page.index(words) for words in order]
    assert places == sorted(places)


def test_page_carries_no_nan_as_json() -> None:
    loss = figures_in(render_html(build.compare_record()))["loss"]["data"]
    last = [t["y"][-1] for t in loss if t["mode"] == "lines"]  # type: ignore[index]
    assert last.count(None) == 3
    assert all(v is None or math.isfinite(v) for v in last)


def test_write_html_writes_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    write_html(build.doctor_record(), path)
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


# The room


def test_views_import_only_records_and_errors_and_text_stays_light() -> None:
    folder = Path(mezzo.report.__file__).parent
    allowed = {"mezzo.records", "mezzo.errors", "mezzo.report"}
    outside = sys.stdlib_module_names | {"rich", "jinja2", "markupsafe", "plotly"}
    trackers = {"tensorboardX": "tensorboard.py", "wandb": "wandb.py", "mlflow": "mlflow.py"}
    for path in folder.rglob("*.py"):
        for name in imported(path):
            tracker = trackers.get(name.split(".")[0])
            assert tracker in (None, path.name), f"{path.name} imports {name}"
            known = tracker or name.split(".")[0] in outside or any(name.startswith(a) for a in allowed)
            assert known, f"{path.name} imports {name}"
            heavy = name.split(".")[0] in ("jinja2", "plotly", "markupsafe")
            assert not heavy or path.name == "html.py", f"{path.name} imports {name}"


def imported(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
    return names
