"""The folder in which processes meet: threads stand for processes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from mezzo.errors import ScriptError
from mezzo.launch.ranks.launched import Launched
from mezzo.launch.ranks.meeting import Meeting, meeting_place


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
    assert not list((tmp_path / "q").iterdir())


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
