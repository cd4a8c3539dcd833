"""Snapshots of a session in several processes: which are complete, and that the same or another number of processes resumes from them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forked_processes import in_forks
from mezzo.engine.snapshots.resumable import complete_snapshots, folder_of, last_number
from paths import SCRIPTS

_END = re.compile(r"RANK (\d+) made (\d+) weights (\S+) updates (\d+) rewinds (\[.*?\]) ended (.*)")
_SCRIPT = str(SCRIPTS / "session_ranks.py")


def snapshot(folder: Path, rank: int, size: int, number: int) -> None:
    place = folder_of(folder, rank, size)
    place.mkdir(parents=True, exist_ok=True)
    (place / f"{number:06d}-update-{10 * number:08d}.safetensors").touch()


def test_a_snapshot_is_whole_if_every_process_has_it(tmp_path: Path) -> None:
    snapshot(tmp_path, 0, 1, 1)  # of one process
    for number in (2, 3, 4):
        snapshot(tmp_path, 0, 2, number)
    for number in (2, 3):  # killed while it saved the fourth
        snapshot(tmp_path, 1, 2, number)
    snapshot(tmp_path, 0, 4, 5)  # the other three were killed before their first
    found = complete_snapshots(tmp_path)
    assert [(one.number, len(one.paths)) for one in found] == [(3, 2), (2, 2), (1, 1)]
    assert [path.parent.name for path in found[0].paths] == ["rank-0-of-2", "rank-1-of-2"]
    assert last_number(tmp_path) == 5  # the next one is the sixth, however many processes save it
    assert complete_snapshots(tmp_path / "none") == []


def ends(folder: Path, size: int, kind: str, mode: str) -> list[tuple[str, ...]]:
    """Run the script in ``size`` processes; return what each said, in order."""
    printed = [one.printed for one in in_forks([kind, str(folder), mode], program=[_SCRIPT], size=size)]
    found = [_END.search(text) for text in printed]
    assert all(found), printed
    return [one.groups() for one in found if one is not None]


def weights(found: list[tuple[str, ...]]) -> list[float]:
    return [float(one[2]) for one in found]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "others"), [("ddp", [(1, "one")]), ("fsdp", [(1, "fsdp"), (4, "fsdp")])])
def test_any_number_of_processes_resumes_from_two(kind: str, others: list[tuple[int, str]], tmp_path: Path) -> None:
    undisturbed = ends(tmp_path, 2, kind, "save")
    assert weights(undisturbed)[0] == weights(undisturbed)[1]
    assert ends(tmp_path, 2, kind, "load") == undisturbed  # to the bit
    for size, other in others:
        found = ends(tmp_path, size, other, "load")
        assert weights(found) == [pytest.approx(weights(undisturbed)[0], rel=1e-6)] * size
        assert {one[3] for one in found} == {"10"}


@pytest.mark.slow
def test_all_processes_stop_after_the_same_update(tmp_path: Path) -> None:
    first, second = ends(tmp_path, 2, "ddp", "stop")
    assert first[1:4] == second[1:4]
    assert "loss spike, update 65: rank 1: the last 5 losses are 100" in first[5]
    assert "loss spike, update 65: the last 5 losses are 100" in second[5]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_all_processes_return_to_the_same_snapshot(kind: str, tmp_path: Path) -> None:
    first, second = ends(tmp_path, 2, kind, "rewind")
    assert first[1:] == second[1:]
    assert first[4] == "['000002-update-00000051.safetensors']"
    assert first[5] == ""
