"""Processes with unlike numbers of batches: under ``join()`` they train or are refused; without it the short one is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from forked_processes import in_forks
from helpers_values import record_at
from mezzo.records import RunRecord
from paths import SCRIPTS

pytestmark = pytest.mark.slow

_SAME = "where they make different numbers of updates; allowed: the same number in each"
_REFUSED = "in several processes, and the script trains under join(), "


def ran(folder: Path, how: str, *options: str) -> RunRecord:
    in_forks(["run", "--policy", "fp16", *options, "--out", "out", str(SCRIPTS / "uneven.py"), how], folder=folder)
    record = record_at(folder / "out" / "record.json", RunRecord)
    return record


def test_join_trains_and_the_record_has_the_updates_of_each(tmp_path: Path) -> None:
    record = ran(tmp_path, "join")
    assert (record.exit_code, record.error) == (0, None)
    assert [one.num_steps for one in record.ranks] == [20, 12]
    assert record.ranks[0].weights == record.ranks[1].weights != ""


@pytest.mark.parametrize(
    ("how", "options", "says"),
    [
        ("join", ["--snapshot", "1m"], f"--snapshot {_REFUSED}{_SAME}"),
        ("session", [], "a session in join(), where a process without batches makes no updates"),
    ],
)
def test_what_needs_the_same_updates_is_refused_under_join(
    how: str, options: list[str], says: str, tmp_path: Path
) -> None:
    record = ran(tmp_path, how, *options)
    assert record.exit_code != 0
    assert record.error is not None
    assert says in record.error
    assert len(record.steps) == 0


def test_a_process_that_runs_out_of_batches_is_named(tmp_path: Path) -> None:
    record = ran(tmp_path, "alone")
    assert record.exit_code != 0
    assert record.error is not None
    assert record.error.startswith(
        "rank 1: its script ended after 12 updates, while rank 0 still waited for it: give all processes as many batches, "
        "or use join() ("
    )
