"""Rank 0 and its followers, which are threads here, and their scripts functions."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers_launch import request_for
from mezzo.children.signals import stoppable
from mezzo.launch.ranks import following, leading
from mezzo.launch.ranks.launched import Launched
from mezzo.launch.ranks.leading import Leader, free_port, new_rendezvous
from mezzo.launch.ranks.meeting import Meeting
from mezzo.launch.request import Request
from mezzo.records import AnyRecord, RunRecord, Steps, write_record
from record_builders import environment

SIZE = 3
Script = Callable[[Request, Callable[[], bool]], dict[str, Any]]
"""Returns fields of the record of one rank's run."""


def runs(script: Script) -> Any:
    """Return what runs a request, as the runner does: it leaves a record where the request says."""

    def run_one(request: Request, *, output: Path | None, interrupted: Callable[[], bool]) -> AnyRecord:
        fields = script(request, interrupted)
        known: dict[str, Any] = {"command": [], "script": "t.py", "script_sha256": "", "policy": str(request.policy)}
        record = RunRecord(**known, environment=environment(), **fields)
        write_record(record, Path(request.record_path))
        return record

    return run_one


@contextmanager
def job(folder: Path, script: Script, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Leader, Any]]:
    """Yield the leader of a job whose other processes follow in threads."""
    monkeypatch.setattr(leading, "AFTER_FAILURE_S", 0.2)
    monkeypatch.setattr(following, "run_alone", runs(script))
    codes: list[int] = []

    def process(rank: int) -> Meeting:
        one = Launched(rank=rank, size=SIZE, local_rank=rank, launcher="torchrun", one_machine=True, job="j")
        return Meeting(one, folder / "meeting", join_s=20)

    def follow(rank: int) -> None:
        codes.append(following.follow(process(rank))[0])

    threads = [threading.Thread(target=follow, args=(rank,)) for rank in range(1, SIZE)]
    for thread in threads:
        thread.start()
    with leading.leading(process(0)) as lead:
        yield lead, runs(script)
        lead.exit_code = 7
    for thread in threads:
        thread.join()
    assert codes == [7] * (SIZE - 1)  # every process ends as the command does


def request(folder: Path, name: str = "run", policy: str = "fp16") -> Request:
    return request_for(folder / name, "t.py", policy=policy)


def run(lead: Leader, run_one: Any, asked: Request, limit_s: float | None = None) -> RunRecord:
    Path(asked.record_path).parent.mkdir(exist_ok=True)
    record = lead.run(asked, output=None, limit_s=limit_s, run_one=run_one)
    assert isinstance(record, RunRecord)
    return record


def test_runs_follow_one_another_in_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int | None]] = []
    lock = threading.Lock()

    def script(asked: Request, interrupted: Callable[[], bool]) -> dict[str, Any]:
        with lock:
            seen.append((str(asked.policy), asked.rank))
        return {"steps": Steps(loss=[float(asked.rank or 0)], skipped=[False])}

    with job(tmp_path, script, monkeypatch) as (lead, run_one):
        for name in ("fp32", "fp16", "fp32"):
            record = run(lead, run_one, request(tmp_path, name, name))
            assert record.steps.loss == [1.0]  # the mean of 0, 1, 2
            assert [rank.rank for rank in record.ranks] == [0, 1, 2]
    assert [policy for policy, _ in seen] == ["fp32"] * 3 + ["fp16"] * 3 + ["fp32"] * 3  # in step
    assert sorted(rank for _, rank in seen[:3] if rank is not None) == [0, 1, 2]


def test_a_rank_that_fails_ends_the_run_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(asked: Request, interrupted: Callable[[], bool]) -> dict[str, Any]:
        if asked.rank == 1:
            return {"error": "ValueError: bad", "exit_code": 1}
        while not interrupted():
            time.sleep(0.01)
        return {"error": "stopped by SIGTERM", "exit_code": 143}

    with job(tmp_path, script, monkeypatch) as (lead, run_one):
        record = run(lead, run_one, request(tmp_path))
        assert (record.error, record.exit_code) == ("rank 1: ValueError: bad", 1)
        assert [rank.error for rank in record.ranks][::2] == ["stopped by SIGTERM"] * 2


def test_a_rank_that_hangs_ends_the_run_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(asked: Request, interrupted: Callable[[], bool]) -> dict[str, Any]:
        while asked.rank == 2 and not interrupted():
            time.sleep(0.01)
        return {"error": "stopped by SIGTERM", "exit_code": 143} if asked.rank == 2 else {}

    wait_for_others = Leader._wait_for_others

    def reach_the_limit(lead: Leader, under_way: Any) -> None:
        while 1 not in under_way.ended:  # rank 0 has ended before
            assert not lead._over(under_way)
            time.sleep(0.01)
        under_way.began_s = float("-inf")
        wait_for_others(lead, under_way)

    monkeypatch.setattr(Leader, "_wait_for_others", reach_the_limit)
    with job(tmp_path, script, monkeypatch) as (lead, run_one):
        for name in ("run", "next"):  # the next run is a fresh one
            record = run(lead, run_one, request(tmp_path, name), limit_s=3000)
            assert record.error == "stopped at its limit of 3000 s: rank 2: it made no progress"
            assert record.stopped_at_limit


@pytest.mark.parametrize("variables", [{}, {"MASTER_PORT": "29500"}])
def test_a_store_of_an_earlier_run_is_never_used_again(variables: dict[str, str]) -> None:
    fresh = new_rendezvous(variables)
    if not variables:
        assert fresh == {}  # the script finds its processes in its own way
        return
    assert fresh["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert fresh["MASTER_PORT"] != "29500"


def test_paddles_store_of_an_earlier_run_is_never_used_again() -> None:
    fresh = new_rendezvous({"PADDLE_MASTER": "10.0.0.1:51832"})
    host, port = fresh["PADDLE_MASTER"].split(":")
    assert list(fresh) == ["PADDLE_MASTER"]
    assert host == "10.0.0.1"
    assert port != "51832"


class LeavesLastWord(Meeting):
    """Another process writes its last message and ends while this one asks whether it lives."""

    last_word: tuple[str, dict[str, Any]]

    def gone(self, rank: int) -> bool:
        self.put(*self.last_word)
        return True


def last_words(folder: Path, rank: int, name: str, message: dict[str, Any]) -> LeavesLastWord:
    one = Launched(rank=rank, size=2, local_rank=rank, launcher="torchrun", one_machine=True, job="j")
    meeting = LeavesLastWord(one, folder / "meeting")
    meeting.last_word = name, message
    meeting.open()
    return meeting


def test_a_process_that_ended_well_and_is_gone_has_not_vanished(tmp_path: Path) -> None:
    meeting = last_words(tmp_path, 0, "ended-1-1", {"error": None, "exit_code": 0, "stopped": False})
    run = leading._Run(1, None, time.monotonic(), {}, set())
    Leader(meeting)._over(run)
    meeting.leave()
    assert (list(run.ended), run.vanished, run.failed_s) == ([1], set(), None)


def test_a_command_that_is_over_is_told_by_a_rank_0_that_is_gone(tmp_path: Path) -> None:
    meeting = last_words(tmp_path, 1, "over", {"exit_code": 3, "reason": "", "rank": None})
    with stoppable() as stop:
        code, recorded = following._follow(meeting, stop)
    meeting.leave()
    assert (code, recorded) == (3, None)


# --- The port of a job's store: one that is free, and that no outgoing connection is given before the store is opened ---


def test_it_is_below_those_of_outgoing_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tmp_path / "range"
    given.write_text("20000\t60999\n")
    monkeypatch.setattr(leading, "_RANGE", given)
    assert all(10_240 <= free_port() < 20_000 for _ in range(50))


@pytest.mark.parametrize("text", [None, "", "none"])
def test_where_the_system_does_not_say_its_range_the_usual_one_counts(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "range").write_text(text)
    monkeypatch.setattr(leading, "_RANGE", tmp_path / "range")
    assert 10_240 <= free_port() < 32_768


def test_one_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", free_port()))
        number = taken.getsockname()[1]
        other = free_port()
        drawn = iter([number, number, other])
        monkeypatch.setattr(random.SystemRandom, "randrange", lambda self, low, high: next(drawn))
        assert free_port() == other


def test_where_connections_may_have_any_port_the_system_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "range").write_text("1024 65535")
    monkeypatch.setattr(leading, "_RANGE", tmp_path / "range")
    assert free_port() >= 1024
