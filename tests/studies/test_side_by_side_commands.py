"""``--jobs 2`` of the commands that choose their next run by the last, with forked runs: the answer is that of one run at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forked_processes import forked_runs
from mezzo import cli
from mezzo.records import CheckRecord, FallbackRecord, TuneRecord, read_record
from paths import SCRIPTS

pytestmark = pytest.mark.slow

FALLBACK = ["fallback", "--fresh", "1", str(SCRIPTS / "fragile.py")]
CHECK = ["check", "--seeds", "2", str(SCRIPTS / "plain.py"), "6"]
TUNE = [
    "tune",
    "--policies",
    "as-is,fp32",
    "--changes",
    "channels-last",
    "--steps",
    "10",
    "--seeds",
    "2",
    "--gpu",
    "none",
]


def answer(record: Any) -> Any:
    """Return what a command found, times left out."""
    if isinstance(record, FallbackRecord):
        return record.verdict, record.kept, record.modules, record.noise, record.verifications
    if isinstance(record, CheckRecord):
        assert record.comparison is not None
        rows = [(row.policy, row.verdict, row.loss, row.num_runs) for row in record.comparison.rows]
        return rows, [(one.what, one.why, one.resumed) for one in record.stages]
    assert isinstance(record, TuneRecord)
    # Which of them are finalists is a matter of times.
    return [one.name for one in record.trials if one.round == "1"], {(row.name, row.inputs) for row in record.rows}


@pytest.mark.parametrize(
    "words", [FALLBACK, CHECK, [*TUNE, str(SCRIPTS / "plain.py"), "40"]], ids=lambda words: words[0]
)
def test_two_at_once_end_with_the_answer_of_one_at_a_time(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # a share of the threads adds in another order than all of them
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(
        "mezzo.commands.tune.command.check_times", lambda engine: None
    )  # it refuses a CPU for the times alone
    found = []
    for out, jobs in (("alone", []), ("beside", ["--jobs", "2"])):
        command, *rest = words
        with forked_runs():
            code = cli.main([command, *jobs, "--out", str(tmp_path / out), *rest])
        record = read_record(tmp_path / out / "record.json")
        found.append((code, answer(record)))
    assert found[0] == found[1]
