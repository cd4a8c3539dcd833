"""The index of a folder of records: all of them, whatever their names, quickly, and each with a link that works."""

from __future__ import annotations

import json
import os
import re
import time
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest

import record_builders as build
from mezzo import cli
from mezzo.errors import RecordError
from mezzo.records import RunRecord, Steps, write_record
from mezzo.report import html
from mezzo.report.html import write_index
from mezzo.report.index import MOST_ROWS, entry_of, find_records, index_sheet, outdated, page_of, read_all

HOSTILE = "<script>alert(1)</script>\x1b[31m\"'&\u202e%{x}"
DOZENS = 1000


def run_at(day: int, *, policy: str = "fp16", loss: float = 0.5, **fields: object) -> RunRecord:
    environment = build.environment(date=f"2026-02-{day:02d}T08:00:00+00:00")
    return build.run_record(policy, steps=Steps(loss=[2.0, loss]), environment=environment, **fields)


def links_in(page: str) -> list[str]:
    return [unquote(unescape(link)) for link in re.findall(r'<a href="(?!#)([^"]*)"', page)]


def test_records_are_found_but_not_those_of_a_commands_own_runs(tmp_path: Path) -> None:
    for place in ("b", "a/deep", "compare", "compare/fp32-seed0", ".hidden"):
        write_record(run_at(1), tmp_path / place / "record.json")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.json").write_text("{}")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    found = [path.relative_to(tmp_path).as_posix() for path in find_records(tmp_path)]
    assert found == ["a/deep/record.json", "b/record.json", "compare/record.json"]


def test_an_index_says_what_each_record_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "110")  # parallel test processes have another width
    records = {
        "one": build.compare_record(num_steps=10),
        "two": run_at(5),
        "three": run_at(6, error="out of memory"),
        "machine": build.doctor_record(),
    }
    for name, record in records.items():
        write_record(record, tmp_path / name / "record.json")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "record.json").write_text('{"kind": "run"')
    assert cli.main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "4 of 5 pages were missing or older than their records" in said.err
    lines = said.out.splitlines()
    assert lines[0] == f"5 records in {tmp_path.name}"
    cells = {line.split()[-1]: re.split(r"\s{2,}", line.strip()) for line in lines[4:9]}
    assert cells["three"] == ["2026-02-06 08:00 UTC", "train.py", "run", "fp16", "failed", "three"]
    assert cells["one"][1:5] == ["train.py", "compare", "fp32, bf16, fp16, fp16-pure", "equivalent"]
    assert cells["broken"][-2:] == ["cannot be read", "broken"]
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    places = [
        page.index(words) for words in ("2026-02-06 08:00 UTC", "2026-02-05 08:00 UTC", "2026-02-03 14:05:09 UTC")
    ]
    assert places == sorted(places)  # the newest first
    assert {(tmp_path / link).is_file() for link in links_in(page)} == {True}
    assert {link.split("/")[0] for link in links_in(page)} == set(records)


def test_a_record_that_no_view_can_show_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for day, name in ((1, "odd"), (2, "good")):
        write_record(run_at(day), tmp_path / name / "record.json")
    write = html.write_html
    monkeypatch.setattr(
        html, "write_html", lambda record, page: {}["missing"] if page.parent.name == "odd" else write(record, page)
    )

    assert cli.main(["report", str(tmp_path)]) == 0

    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    odd, good = (next(words for words in lines if words[-1:] == [name]) for name in ("odd", "good"))
    assert odd[-4:-1] == ["cannot", "be", "read"]
    assert "fp16" in good


def test_pages_that_are_newer_than_their_records_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one" / "record.json"
    write_record(run_at(1), path)
    assert outdated(path)
    page = page_of(path)
    page.write_text("kept")
    os.utime(page, ns=(path.stat().st_mtime_ns, path.stat().st_mtime_ns))
    assert not outdated(path)
    assert cli.main(["report", str(tmp_path)]) == 0
    assert page.read_text() == "kept"
    os.utime(path, ns=(time.time_ns() + 10**9, time.time_ns() + 10**9))
    assert cli.main(["report", str(tmp_path)]) == 0
    assert "<!doctype html>" in page.read_text()
    capsys.readouterr()


def test_the_history_of_a_script_joins_records_of_one_command() -> None:
    folder = Path("/runs")
    records = [
        ("c", run_at(3, loss=0.25)),
        ("a", run_at(1, loss=0.75)),
        ("b", run_at(2, policy="bf16", loss=0.5)),
        ("d", build.compare_record(num_steps=4, environment=build.environment(date="2026-02-04T08:00:00+00:00"))),
    ]
    sheet = index_sheet([entry_of(folder / name / "record.json", record, folder) for name, record in records], folder)
    (history,) = sheet.histories
    assert [entry.place for entry in history.entries] == ["a", "b", "c", "d"]
    chart = history.chart
    assert chart is not None
    assert chart.title == "Final loss of train.py under mezzo run"
    assert {line.name: line.y[0] if line.name == "fp16" else line.y[1] for line in chart.lines} == {
        "fp16": 0.75,
        "bf16": 0.5,
    }
    fp16 = next(line for line in chart.lines if line.name == "fp16")
    assert list(fp16.y) == [0.75, 0.75, 0.25]  # the record without it leaves no gap
    assert chart.description.endswith("now fp16 0.25.")


def test_a_thousand_hostile_names_leave_the_index_intact(tmp_path: Path) -> None:
    entries = []
    for number in range(DOZENS):
        name = f"{HOSTILE.replace('/', '')}{number}" + "long" * (number % 40)
        record = run_at(
            1 + number % 28, policy=f"fp16:{HOSTILE}{number}", script=f"{HOSTILE}{number}.py", error=HOSTILE * 3
        )
        entries.append(entry_of(tmp_path / name / "record.json", record, tmp_path))
    sheet = index_sheet(entries, tmp_path)
    write_index(sheet, tmp_path / "index.html")
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert (len(sheet.entries), sheet.num_older) == (MOST_ROWS, DOZENS - MOST_ROWS)
    assert "<script>alert" not in page
    assert not re.search("[\x1b\u202e]", page)
    assert len(page.encode()) <= 1_200_000
    for link in links_in(page):
        assert re.fullmatch(r"[^/]*/report\.html", link)
        assert ".." not in link.split("/")


def test_a_name_that_is_not_text_has_a_link_that_works(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9 #1?")
    write_record(run_at(1), folder / "record.json")
    assert cli.main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    (link,) = set(re.findall(r'<a href="(?!#)([^"]*)"', page))
    assert (tmp_path / unquote(link, errors="surrogateescape")).is_file()


def test_outputs_of_ten_megabytes_leave_the_page_and_the_index_intact(tmp_path: Path) -> None:
    path = tmp_path / "big" / "record.json"
    write_record(run_at(1, error="x" * 10_000_000, policy="fp16:" + "y" * 10_000, script="z" * 100_000), path)
    assert cli.main(["report", str(tmp_path)]) == 0
    assert page_of(path).stat().st_size < 400_000
    assert (tmp_path / "index.html").stat().st_size < 100_000


def test_a_hundred_records_are_indexed_in_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = build.compare_record(num_seeds=3, num_steps=184)
    first = tmp_path / "r0" / "record.json"
    write_record(record, first)
    for number in range(100):
        folder = tmp_path / f"r{number}"
        folder.mkdir(exist_ok=True)
        (folder / "record.json").write_bytes(first.read_bytes())
        (folder / "report.html").write_text("drawn before")
    began = time.process_time()  # not the wall time: other tests run in parallel
    assert cli.main(["report", str(tmp_path)]) == 0
    assert time.process_time() - began < 3
    assert capsys.readouterr().out.startswith("100 records in")


BAD = [
    ([], "RECORD"),
    (["{empty}"], "there is no record.json in {empty} or below it"),
    (["{runs}", "{runs}"], "{runs} is a folder, and 2 paths were given; allowed: one folder, or records"),
    (["{runs}", "--out", "x"], "--out goes with records, and {runs} is a folder, whose index is written into it"),
    (["{runs}", "--json"], "--json goes with records, and {runs} is a folder, whose index is written into it"),
]


@pytest.mark.parametrize(("words", "message"), BAD)
def test_wrong_words_are_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(run_at(1), tmp_path / "runs" / "one" / "record.json")
    (tmp_path / "empty").mkdir()
    names = {"runs": str(tmp_path / "runs"), "empty": str(tmp_path / "empty")}
    assert cli.main(["report", *(word.format(**names) for word in words)]) == 2
    assert message.format(**names) in capsys.readouterr().err


def test_the_folder_of_one_record_is_that_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_record(run_at(1), tmp_path / "one" / "record.json")
    assert cli.main(["report", str(tmp_path / "one")]) == 0
    assert "train.py trained 2 steps under fp16" in capsys.readouterr().out
    assert (tmp_path / "one" / "report.html").is_file()
    assert not (tmp_path / "one" / "index.html").exists()


def test_a_newer_record_is_a_line_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "new" / "record.json"
    write_record(run_at(1), path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": 99}))
    ((_, found),) = read_all([path])
    assert isinstance(found, RecordError)
    assert "schema version 99" in entry_of(path, found, tmp_path).headline


def test_open_shows_the_page_and_says_so_where_there_is_no_browser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: bool(opened.append(address)))
    write_record(run_at(1), tmp_path / "one" / "record.json")
    assert cli.main(["report", "--open", str(tmp_path / "one" / "record.json")]) == 0
    assert cli.main(["report", "--open", str(tmp_path)]) == 0
    assert opened == [(tmp_path / "one" / "report.html").as_uri(), (tmp_path / "index.html").as_uri()]
    assert f"no browser could be started; open {opened[0]}" in capsys.readouterr().err


def test_a_prediction_is_listed_under_its_script_and_its_answer_stays_on_a_line(tmp_path: Path) -> None:
    write_record(build.predict_record(model="folder/train.py"), tmp_path / "one" / "record.json")
    entries = [entry_of(path, record, tmp_path) for path, record in read_all(find_records(tmp_path))]
    write_index(index_sheet(entries, tmp_path), tmp_path / "index.html")
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert [entry.script for entry in entries] == ["train.py"]
    assert '<td class="word whole"><span class="badge' in page
    assert '<span class="whole">a100-80gb</span>' in page
