"""Every record that the schema allows has a page, a text, a line in the index and an entry for trackers, without control characters.

Valid records of every kind are changed at random: texts that control a terminal, numbers that are not finite or absurd, lists that are
empty, doubled or turned around, fields that are left out. What the schema refuses is not counted.
"""

from __future__ import annotations

import functools
import io
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import every_page
import pytest
from pydantic import ValidationError

import record_builders as build
from mezzo.cli import results
from mezzo.records import AnyRecord
from mezzo.records.files import _adapter
from mezzo.report.html import render_html, write_index
from mezzo.report.index import entry_of, index_sheet
from mezzo.report.log_entries import log_entry
from mezzo.report.terminal import print_index, render

TEXTS = [
    "",
    "\x1b[31mred\x1b[0m", "a\x07b\x9b2Jc", "\u202eturned", "x" * 5000, "nul\0", "\r\nline", "<script>alert(1)</script>", "é中文", "0", "-",
    "fp16", "train.py:3", "\x1b]0;title\x07", "2999-01-01T00:00:00+00:00", "{{7*7}}", "{run}", "%s", "\u2028", "--", "/", "a:b:c", "1e400",
]  # fmt: skip
NUMBERS = [
    0,
    -1,
    1,
    2,
    10**9,
    10**18,
    0.0,
    -0.0,
    1e-320,
    1e308,
    -1e308,
    0.5,
    100.0,
    float("nan"),
    float("inf"),
    "nan",
    None,
]
NEVER = ("kind", "schema_version")
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
CHUNKS, RECORDS = 8, 25
"""``python -m pytest`` tries 200; a search by hand tried 5,000."""


@functools.cache
def originals(folder: Path) -> list[Any]:
    records: list[AnyRecord] = [
        build.run_record(num_steps=20), build.compare_record(num_seeds=2, num_steps=10), build.check_record(), every_page.audit(folder),
        build.predict_record(detail=build.prediction_detail()), every_page.diagnosis(folder), every_page.ranges(), every_page.fallback(),
        build.tune_record(), build.resume_check_record(), build.doctor_record(),
    ]  # fmt: skip
    return [json.loads(record.model_dump_json()) for record in records]


def changed(value: Any, draw: random.Random, rate: float) -> Any:
    if isinstance(value, dict):
        kept = {name: one for name, one in value.items() if name in NEVER or draw.random() >= rate * 0.3}
        return {name: one if name in NEVER else changed(one, draw, rate) for name, one in kept.items()}
    if isinstance(value, list):
        if draw.random() < rate:
            return draw.choice([[], value[:1], value[::-1], value + value])
        return [changed(one, draw, rate) for one in value]
    if draw.random() >= rate:
        return value
    if isinstance(value, bool):
        return not value
    return draw.choice(
        TEXTS if isinstance(value, str) else NUMBERS if isinstance(value, (int, float)) else [*TEXTS, *NUMBERS, [], {}]
    )


def odd_records(folder: Path, first_seed: int, count: int) -> list[tuple[int, AnyRecord]]:
    """Return records that the schema allows, each with its seed."""
    found: list[tuple[int, AnyRecord]] = []
    seed = first_seed
    while len(found) < count:
        draw, seed = random.Random(seed), seed + 1
        data = changed(draw.choice(originals(folder)), draw, draw.choice([0.01, 0.03, 0.1]))
        try:
            found.append((seed - 1, _adapter().validate_json(json.dumps(data))))
        except ValidationError:
            continue
    return found


def printed(show: Callable[[Any], object], width: int) -> str:
    text = io.StringIO()
    show(type(results.console())(file=text, width=width))
    return text.getvalue()


def shown(record: AnyRecord, folder: Path) -> dict[str, str]:
    """Return what every view makes of a record."""
    sheet = index_sheet([entry_of(folder / "record.json", record, folder)] * 2, folder)
    write_index(sheet, folder / "index.html")
    log_entry(record)
    return {
        "page": render_html(record),
        "text": printed(lambda screen: render(record, screen), 110),
        "short text": printed(lambda screen: render(record, screen, verbose=False), 60),
        "index": (folder / "index.html").read_text(encoding="utf-8"),
        "lines of the index": printed(lambda screen: print_index(sheet, screen), 110),
        "json": results.json_text(record),
    }


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_record_that_the_schema_allows_is_shown(chunk: int, tmp_path: Path) -> None:
    for seed, record in odd_records(tmp_path, chunk * 100_000, RECORDS):
        views = shown(record, tmp_path)
        assert [(seed, name, found[0]) for name, text in views.items() if (found := CONTROLS.search(text))] == []
