"""What ``mezzo compare`` asks of its runs, without running any; several comparisons in one table."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from mezzo import cli
from mezzo.cli import compare as command
from mezzo.launch.request import Request
from mezzo.records import CompareRecord, Effective, Reason, RunRecord, write_record
from mezzo.report.html import write_together
from mezzo.report.text import render_together
from record_builders import compare_record, emulated_record, run_record


@pytest.mark.parametrize(
    ("timeout_s", "limits"),
    [
        (
            None,
            [None, 600.0, 900.0, 900.0],
        ),  # nothing is known before the first run; then 20 times the longest, at least 600 s
        (7.0, [7.0, 7.0, 7.0, 7.0]),
    ],
)
def test_a_run_may_take_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout_s: float | None, limits: list[float | None]
) -> None:
    durations, asked = iter([10.0, 45.0, 3.0, 1.0]), []

    def run(request: Request, *, output: Path, limit_s: float | None) -> RunRecord:
        asked.append(limit_s)
        return run_record("fp32", duration_s=next(durations))

    monkeypatch.setattr("mezzo.launch.runner.run_child", run)
    request = Request(
        target="train.py", kind="script", policy="fp32", record_path=str(tmp_path / "r" / "record.json"), command=()
    )
    command._run_all([request] * 4, timeout_s=timeout_s)
    assert asked == limits


def test_a_run_that_failed_says_nothing_of_how_long_others_may_take() -> None:
    failed = run_record("fp16", duration_s=1000.0, error="it was stopped", exit_code=137)
    assert command._limit_s([failed]) is None
    assert command._limit_s([failed, run_record("fp32", duration_s=40.0)]) == 800.0


def in_paddle(record: CompareRecord) -> CompareRecord:
    noop = Reason(what="auto_cast", value="off", reason="Paddle casts nothing on a CPU")
    effective = Effective(flops_by_format={"fp32": 10}, left_alone=[noop])
    runs = [r.model_copy(update={"framework": "paddle 3.3.1", "effective": effective}) for r in record.runs]
    rows = [r.model_copy(update={"share_by_format": {"fp32": 1.0}}) for r in record.rows]
    return record.model_copy(update={"runs": runs, "rows": rows})


@pytest.fixture(scope="module")
def records() -> list[CompareRecord]:
    return [compare_record(num_steps=20), in_paddle(emulated_record(num_steps=20))]


def test_several_comparisons_are_one_table_in_the_terminal(records: list[CompareRecord]) -> None:
    printed = io.StringIO()
    render_together(records, Console(width=110, file=printed))
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
    assert "6 rows beside 2 baselines: 2 equivalent, 2 diverged and 2 undecided." in lines
    names = [line.split()[0] for line in lines if re.match(r"(torch|paddle 3.3.1)$| (fp|bf)\d\d", line)]
    assert names == ["torch", "fp32", "bf16", "fp16", "fp16-pure", "paddle", "fp32", "bf16", "fp16", "fp16-pure"]
    assert "Left alone in paddle 3.3.1" in lines
    assert max(map(len, lines)) <= 110


def test_several_comparisons_are_one_table_on_a_page(tmp_path: Path, records: list[CompareRecord]) -> None:
    write_together(records, tmp_path / "together.html")
    page = (tmp_path / "together.html").read_text(encoding="utf-8")
    assert page.count('<table class="verdicts">') == 1
    assert page.count('<tr class="figures">') == 8
    assert page.count('<tr class="group">') == 2
    assert page.count("auto_cast off: Paddle casts nothing on a CPU") == 4


def test_report_puts_comparisons_together(
    tmp_path: Path, records: list[CompareRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "runs" / name / "record.json" for name in ("torch", "paddle")]
    for record, path in zip(records, paths, strict=True):
        write_record(record, path)
    assert cli.main(["report", *map(str, paths)]) == 0
    assert (tmp_path / "runs" / "together.html").is_file()
    assert "6 rows beside 2 baselines" in capsys.readouterr().out
    assert cli.main(["report", str(paths[0]), "--out", str(tmp_path / "pages")]) == 0
    assert not (tmp_path / "pages" / "together.html").exists()
