"""The page: all text is only text, nothing is loaded from outside, and it is small whatever it shows."""

from __future__ import annotations

import ast
import json
import math
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import mezzo.report
import record_builders as build
from mezzo.records import CompareRecord, DoctorRecord, RunRecord
from mezzo.report import formatting
from mezzo.report.html import kept_whole, render_html, write_html

HOSTILE = "<script>alert(1)</script></script><!--%{x}<b>&amp;\x1b[31m\"'"
MOST_BYTES = 400_000


def data_in(page: str) -> dict[str, dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="chart-data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


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
    page = render_html(record)
    assert "<script>alert" not in page
    assert "</script></script>" not in page
    assert "\x1b" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert len(re.findall(r"<script[ >]", page)) == page.count("</script>")


def test_hostile_names_are_text_in_charts_and_their_data() -> None:
    page = render_html(hostile_compare())
    names = [line["name"] for line in data_in(page)["loss"]["lines"]]
    assert formatting.clean(HOSTILE) in names
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(drawings) > 4
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)  # well-formed, whatever the names
        assert {element.tag for element in root.iter()} <= {"svg", "g", "path", "text", "rect", "clipPath"}


@pytest.mark.parametrize("record", [build.compare_record(), build.run_record(), build.doctor_record()])
def test_page_is_self_contained(record: RunRecord | CompareRecord | DoctorRecord) -> None:
    page = render_html(record)
    assert len(page.encode()) < MOST_BYTES
    known = page.replace("http://www.w3.org/2000/svg", "")  # a name, which nothing loads
    assert not re.search(r"https?://|@import|url\((?!#)|\bimport\(|<link|<img|<iframe|\bsrc=|\bhref=\"(?!#)", known)
    assert "default-src 'none'" in page
    assert page.count("prefers-color-scheme: dark") >= 1


def test_page_of_many_long_runs_stays_small_and_says_that_points_are_merged() -> None:
    page = render_html(build.compare_record(num_seeds=5, num_steps=10_000))
    assert len(page.encode()) < MOST_BYTES
    assert "mean of the seeds of the 34 steps behind each point" in page
    assert max(len(chart["x"]) for chart in data_in(page).values()) <= 300


def test_page_of_many_policies_and_losses_stays_small() -> None:
    rows = [build.row(f"fp16:init_scale={n}", "equivalent" if n else "baseline") for n in range(8)]
    record = build.compare_record(
        rows=rows, runs=[build.run_record(r.policy, num_steps=2000, seed=s) for r in rows for s in range(3)]
    )
    assert len(render_html(record.model_copy(update={"baseline": rows[0].policy})).encode()) < MOST_BYTES


def test_page_has_the_answer_before_the_charts_and_the_command_last() -> None:
    record = build.compare_record().model_copy(
        update={"command": ["mezzo", "compare", "--policies", "fp32,bf16", "examples/train.py"]}
    )
    page = render_html(record)
    order = [
        '<section class="answer good"',
        "bf16 trains like fp32",
        "memory, bf16",
        "What to do next",
        "train with bf16",
        "mezzo run --policy bf16 examples/train.py",
        'class="badge good">equivalent</span></td>',
        'data-chart="loss"',
        'data-chart="difference"',
        'data-chart="scale"',
        'id="title-memory"',
        'id="title-times"',
        "Effective formats",
        "<details>\n<summary>What bf16 does",
        "<h2>Environment",
        "mezzo compare --policies fp32,bf16 examples/train.py",
    ]
    places = [page.index(words) for words in order]
    assert places == sorted(places)


def test_page_carries_no_nan_as_json() -> None:
    lines = data_in(render_html(build.compare_record()))["loss"]["lines"]
    last = [line["y"][-1] for line in lines]
    assert last.count(None) == 1
    assert all(v is None or math.isfinite(v) for v in last)


def test_pages_do_not_change_from_time_to_time() -> None:
    record = build.compare_record(num_steps=20)
    assert render_html(record) == render_html(record)


def test_write_html_writes_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    write_html(build.doctor_record(), path)
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


# The room


def test_views_import_only_records_and_errors_and_heavy_libraries_in_one_file_each() -> None:
    folder = Path(mezzo.report.__file__).parent
    views = [path for name in ("page", "together") for path in (folder.parent / "commands").glob(f"*/{name}.py")]
    pages = {f"mezzo.commands.{path.parent.name}.{path.stem}" for path in views}
    allowed = {
        "mezzo.records",
        "mezzo.errors",
        "mezzo.error_texts",
        "mezzo.readable",
        "mezzo.report",
        "mezzo.secrets",
        "mezzo.version",
        *pages,
    }
    outside = sys.stdlib_module_names | {"rich", "jinja2", "markupsafe", "matplotlib", "numpy"}
    trackers = {"tensorboardX": "tensorboard.py", "wandb": "wandb.py", "mlflow": "mlflow.py"}
    only = {
        "jinja2": ("html.py",),
        "matplotlib": ("canvas.py",),
        "numpy": ("canvas.py",),
        "markupsafe": ("html.py", "svg.py"),
    }
    for path in [*folder.rglob("*.py"), *views]:
        for name in imported(path):
            tracker = trackers.get(name.split(".")[0])
            assert tracker in (None, path.name), f"{path.name} imports {name}"
            known = tracker or name.split(".")[0] in outside or any(name.startswith(a) for a in allowed)
            assert known, f"{path.name} imports {name}"
            assert path.name in only.get(name.split(".")[0], (path.name,)), f"{path.name} imports {name}"


def imported(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names if alias.name in ("page", "together")]
            names += inner or [node.module]
    return names


@pytest.mark.parametrize(
    ("text", "page"),
    [
        ("on h100-sxm in tf32", 'on <span class="whole">h100-sxm</span> in tf32'),
        ("at 2026-11-28 16:35 UTC", 'at <span class="whole">2026-11-28 16:35 UTC</span>'),
        ("a <b-c> d", 'a <span class="whole">&lt;b-c&gt;</span> d'),
        ("-37% less", "-37% less"),
        (f"see {'a' * 40}-b", f"see {'a' * 40}-b"),
    ],
)
def test_names_and_dates_stay_on_one_line(text: str, page: str) -> None:
    assert kept_whole(text) == page
