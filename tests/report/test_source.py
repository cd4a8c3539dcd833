"""Source lines on a page: those that ran, with what was found there, and never a file that a record should not reach."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

import record_builders as build
from mezzo.records import AnyRecord, DiagnoseRecord, Finding, RunRecord
from mezzo.report.html import render_html, source_lines
from mezzo.report.pages import page_of
from mezzo.report.source import SourceLines

TEXT = "".join(f"line_{n} = '<i>{n}</i>'\n" for n in range(1, 21))


def source_of(record: AnyRecord, *, typed: str = "") -> SourceLines:
    return source_lines(page_of(record), typed=typed)


def run_of(script: Path, lines: list[str], **fields: object) -> RunRecord:
    finding = Finding(
        code="A601",
        title="a scaler is never updated",
        modules=[],
        detail="d",
        gain="g",
        fix="f",
        severity="error",
        step=1,
        lines=lines,
    )
    known: dict[str, object] = (
        {"script_sha256": hashlib.sha256(script.read_bytes()).hexdigest()} if script.exists() else {}
    )
    environment = build.environment(folder=str(script.parent))
    return build.run_record(script=script.name, findings=[finding], environment=environment, **(known | fields))


def shown(source: SourceLines) -> list[tuple[int, str, bool]]:
    return [(line.number, line.text, bool(line.key)) for file in source.files for part in file.parts for line in part]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(TEXT)
    return path


def test_a_line_is_shown_with_those_around_it_and_its_findings(script: Path) -> None:
    source = source_of(run_of(script, [f"{script}:5"]))
    assert shown(source) == [(n, f"line_{n} = '<i>{n}</i>'", n == 5) for n in range(2, 9)]
    (file,) = source.files
    assert [line.notes for line in file.parts[0] if line.key] == [["A601: a scaler is never updated"]]
    page = render_html(run_of(script, [f"{script}:5"]))
    assert "line_5 = &#39;&lt;i&gt;5&lt;/i&gt;&#39;" in page
    assert '<a href="#line-1">train.py:5</a>' in page


def test_lines_are_counted_as_python_counts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "old.py"
    path.write_bytes(
        b"a = 1\r\n\x0c\r\nb = '\xc2\x85'\rc = 3\n"
    )  # a form feed, a next-line character and three kinds of line ends
    assert [text for _, text, named in shown(source_of(run_of(path, [f"{path}:4"]))) if named] == ["c = 3"]


def test_near_lines_share_a_part_and_far_ones_do_not(script: Path) -> None:
    (file,) = source_of(run_of(script, [f"{script}:{n}" for n in (2, 6, 18)])).files
    assert [[line.number for line in part] for part in file.parts] == [list(range(1, 10)), list(range(15, 21))]


def test_a_relative_name_is_found_from_the_folder_of_the_command(script: Path) -> None:
    assert len(shown(source_of(run_of(script, ["train.py:5"])))) == 7


def test_a_changed_script_is_not_shown(script: Path) -> None:
    record = run_of(script, [f"{script}:5"])
    script.write_text(TEXT + "# changed\n")
    (file,) = source_of(record).files
    assert file.missing == "the file has changed since the run"
    assert shown(source_of(record)) == [(5, "", True)]
    assert "line_5" not in render_html(record)


def test_another_file_is_shown_if_it_is_older_than_the_runs_end(script: Path) -> None:
    other = script.with_name("model.py")
    other.write_text("x = 1\n")
    for age_s, visible in ((-100, True), (100, False)):
        os.utime(other, (1000 + age_s, 1000 + age_s))
        record = run_of(script, [f"{other}:1"], started_at_s=990.0, duration_s=10.0)
        assert [text == "x = 1" for _, text, _ in shown(source_of(record))] == [visible]


def test_files_elsewhere_are_shown_only_to_who_typed_their_name(
    script: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record names its own folder and script: what it says of them opens no file."""
    record = run_of(script, [f"{script}:5"])
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    (file,) = source_of(record).files
    assert file.missing == "it is not a Python file below the folder in which this page was made"
    assert len(shown(source_of(record, typed=str(script)))) == 7


def test_a_secret_in_a_line_is_hidden(tmp_path: Path, script: Path) -> None:
    script.write_text("api_key = 'hunter2-Xy7Qp'\nkey = query @ x\n")
    lines = [text for _, text, _ in shown(source_of(run_of(script, [f"{script}:1"])))]
    assert lines == ["api_key = '<API-KEY>'", "key = query @ x"]


def test_no_record_makes_a_page_show_other_files(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "private" / "secret.txt"
    secret.parent.mkdir()
    secret.write_text("the password")
    python = secret.with_suffix(".py")
    python.write_text("password = 1\n")
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(TEXT)
    monkeypatch.chdir(folder)
    (folder / "link.py").symlink_to(python)
    lines = [
        f"{secret}:1",
        f"{python}:1",
        "../private/secret.py:1",
        f"{folder / 'link.py'}:1",
        "/etc/passwd:1",
        "/dev/zero:1",
        "\0:1",
        "train.py:99",
    ]
    source = source_of(run_of(folder / "train.py", lines, started_at_s=4e9))
    assert "password" not in repr(source)
    assert "root:" not in repr(source)
    assert all(file.missing for file in source.files if "train" not in file.name)


def test_a_diagnosis_shows_its_line(script: Path) -> None:
    run = run_of(script, []).model_copy(update={"findings": []})
    record = DiagnoseRecord(
        run=run, verdict="range_overflow", op="pow", located=True, line=f"{script}:7", step=1, phase="forward"
    )
    source = source_of(record)
    (line,) = [one for file in source.files for part in file.parts for one in part if one.key]
    assert (line.number, line.notes) == (7, ["range overflow: pow"])


def test_records_without_a_run_have_no_source() -> None:
    assert source_of(build.doctor_record()) == SourceLines()
    assert source_of(build.compare_record(num_steps=2)) == SourceLines()
