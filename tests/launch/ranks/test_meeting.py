"""The folder in which processes meet: threads stand for processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from mezzo.errors import ScriptError
from mezzo.launch.ranks.launched import Launched
from mezzo.launch.ranks.meeting import Meeting, meeting_place
from mezzo.temporary import namespace


def process(rank: int, *, size: int = 2, one_machine: bool = True) -> Launched:
    return Launched(rank=rank, size=size, local_rank=rank, launcher="torchrun", one_machine=one_machine, job="j")


def test_they_meet_in_the_folder_of_this_job_whatever_an_earlier_one_left(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "job-old").mkdir()
    (place / "job-old" / "over").write_text('{"exit_code": 3}')
    (place / "welcome-1-old").write_text('{"folder": "job-old"}')
    (place / "hello-1-old").write_text("{}")
    first, second = (Meeting(process(rank), place, join_s=20) for rank in (0, 1))
    arriving = threading.Thread(target=second.join)
    arriving.start()
    first.open()
    arriving.join()
    first.wait_for_all()
    assert second.get("over") is None
    first.put("over", {"exit_code": 0})
    assert second.get("over") == {"exit_code": 0}
    assert second.host_of(0) == first.host_of(1) != ""
    assert not first.gone(1)
    second.leave()
    first.leave()
    assert not list(place.glob("job-[!o]*"))  # its own folder is gone


UNEQUAL = [
    (("run", "--policy", "bf16", "t.py"), "rank 1 of 2 was started with bf16, where rank 0 has fp16"),
    (("audit", "--policy", "fp16", "t.py"), "rank 1 of 2 was started with audit, where rank 0 has run"),
    (("run", "--policy", "fp16", "other.py"), "rank 1 of 2 was started with other.py, where rank 0 has t.py"),
    (("run", "t.py"), "rank 1 of 2 was started with mezzo run t.py, and rank 0 with mezzo run --policy fp16 t.py"),
    (
        ("run", "--policy", "fp16", "t.py", "--token", "hunter2"),
        "rank 1 of 2 was started with mezzo run --policy fp16 t.py --token '<TOKEN>', and",
    ),
]


@pytest.mark.parametrize(("words", "said"), UNEQUAL)
def test_processes_with_unequal_commands_are_told_at_once(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    """Within their time-out of 20 seconds, in which they would wait for each other."""
    place, own = tmp_path / "place", ("run", "--policy", "fp16", "t.py")
    first = Meeting(process(0), place, words=own, join_s=20)
    second = Meeting(process(1), place, words=words, join_s=20)
    told: list[str] = []

    def join() -> None:
        with pytest.raises(ScriptError) as refused:
            second.join()
        told.append(refused.value.message)

    arriving = threading.Thread(target=join)
    arriving.start()
    first.open()
    with pytest.raises(ScriptError) as refused:
        first.wait_for_all()
    arriving.join()
    first.leave()
    assert refused.value.message.startswith(said)
    assert told == [refused.value.message]
    assert "hunter2" not in refused.value.message


def of_process(number: int) -> dict[str, object]:
    began = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[19] if number == os.getpid() else "1"
    return {"pid": number, "began": began, "host": socket.gethostname(), "numbers": namespace()}


@pytest.mark.parametrize("elsewhere", [{}, {"host": "another"}, {"numbers": "1"}])
def test_a_process_of_this_machine_that_has_ended_is_gone_at_once(elsewhere: dict[str, str], tmp_path: Path) -> None:
    meeting = Meeting(process(0), tmp_path / "p", silent_s=60)
    meeting.open()
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    meeting.put("alive-1", {"number": 3, **of_process(ended.pid), **elsewhere})
    assert meeting.gone(1) is not bool(elsewhere)  # before its parent has noticed
    ended.wait()
    assert meeting.gone(1) is not bool(elsewhere)
    meeting.put("alive-1", {"number": 3, **of_process(os.getpid()), "began": "1", **elsewhere})
    assert meeting.gone(1) is not bool(elsewhere)  # another process has its number now
    meeting.put("alive-1", {"number": 3, **of_process(os.getpid())})
    assert not meeting.gone(1)
    meeting.leave()


def test_folders_of_jobs_that_were_killed_are_removed_by_the_next(tmp_path: Path) -> None:
    for name, age_s in (("mezzo-0-old", 1000), ("mezzo-0-new", 0), ("other-0-old", 1000)):
        (tmp_path / name / "job-1").mkdir(parents=True)
        for path in (tmp_path / name / "job-1", tmp_path / name):
            os.utime(path, (time.time() - age_s,) * 2)
    meeting = Meeting(process(0), tmp_path / "mezzo-0-own")
    meeting.open()
    meeting.leave()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mezzo-0-new", "other-0-old"]


def test_a_question_of_a_process_that_is_gone_is_nobodys(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    gone = subprocess.Popen(["true"])
    gone.wait()
    left = {"rank": 1, "words": ["run", "old.py"], "digest": "x", **of_process(gone.pid)}
    (place / "hello-1-old").write_text(json.dumps(left))
    first, second = (Meeting(process(rank), place, words=("run", "t.py"), join_s=20) for rank in (0, 1))
    arriving = threading.Thread(target=second.join)
    arriving.start()
    first.open()
    first.wait_for_all()
    arriving.join()
    second.leave()
    first.leave()


@pytest.mark.parametrize("rank", [0, 1])
def test_who_waits_for_the_others_can_be_stopped(rank: int, tmp_path: Path) -> None:
    class Signalled(Exception):
        pass

    def check() -> None:
        raise Signalled

    meeting = Meeting(process(rank), tmp_path / "place", join_s=60)
    if rank == 0:
        meeting.open()
    with pytest.raises(Signalled):
        (meeting.join if rank else meeting.wait_for_all)(check)
    meeting.leave()


def test_a_process_that_stops_counting_is_gone(tmp_path: Path) -> None:
    meeting = Meeting(process(0), tmp_path / "p", silent_s=0.0)
    meeting.open()
    meeting.put("alive-1", {"number": 1, "host": "h"})
    assert not meeting.gone(1)
    while not meeting.gone(1):  # the same number once more
        pass
    meeting.put("alive-1", {"number": 2, "host": "h"})
    assert not meeting.gone(1)
    meeting.leave()


def test_who_is_missing_is_named(tmp_path: Path) -> None:
    lead = Meeting(process(0, size=3), tmp_path / "p", join_s=0.05)
    lead.open()
    with pytest.raises(ScriptError, match=r"ranks 1, 2 of 3 did not join within 0\.05 s"):
        lead.wait_for_all()
    lead.leave()
    with pytest.raises(ScriptError, match="rank 1 of 2 found no rank 0 in"):
        Meeting(process(1), tmp_path / "q", join_s=0.05).join()
    assert not (tmp_path / "q").exists()


def test_machines_meet_beside_the_results_and_one_machine_in_its_temporary_folder(tmp_path: Path) -> None:
    assert meeting_place(process(0, one_machine=False), shared=tmp_path) == tmp_path / ".mezzo-j"
    assert meeting_place(process(0), shared=tmp_path).name == f"mezzo-{os.getuid()}-j"


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "p"
    place.mkdir()
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    with pytest.raises(ScriptError, match="belongs to another user"):
        Meeting(process(0), place).open()
