"""The snapshot that a run resumes: one that all its processes have."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from mezzo.engine.snapshots import container
from mezzo.engine.snapshots.structure import take_apart
from mezzo.errors import SnapshotError
from mezzo.launch.request import SnapshotRequest
from mezzo.launch.torch.snapshots.proof import RunStart, choose_start

RUN = {"script": "t.py"}


def asked(folder: Path, *, rank: int = 0, ranks: int = 2, resume: bool = True, first: bool = False) -> SnapshotRequest:
    whole = SnapshotRequest(
        folder=str(folder / "snapshots"), every_s=1.0, resume=resume, identity=RUN, may_be_first=first
    )
    meeting = folder / "meeting"
    meeting.mkdir(exist_ok=True)
    return whole if ranks == 1 else whole.for_rank(rank, ranks=ranks, meeting=str(meeting))


def save(folder: Path, rank: int, *numbers: int, **contents: Any) -> None:
    """Write snapshots, each of ten times as many updates as its number."""
    for number in numbers:
        tree, tensors = take_apart({"run": RUN, "script": {}, "number": number, "w": torch.ones(3), **contents})
        path = folder / "snapshots" / f"rank-{rank}-of-2" / f"{number:06d}-update-{10 * number:08d}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        container.write(path, tree, tensors)


def together(folder: Path, **options: bool) -> list[RunStart | SnapshotError]:
    """Return where two processes begin, which talk at the same time."""
    found: list[Any] = [None, None]

    def one(rank: int) -> None:
        try:
            found[rank] = choose_start(asked(folder, rank=rank, **options))
        except SnapshotError as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def numbers(starts: list[RunStart | SnapshotError]) -> list[Any]:
    return [
        str(one) if isinstance(one, SnapshotError) else (one.chosen and one.chosen.contents["number"], one.last_number)
        for one in starts
    ]


def test_both_processes_go_on_from_the_newest_that_both_have(tmp_path: Path) -> None:
    save(tmp_path, 0, 5, 6, 7)
    save(tmp_path, 1, 4, 5, 6)  # it was killed while it wrote the seventh
    assert numbers(together(tmp_path)) == [(6, 7), (6, 7)]  # and both number the next one 8


@pytest.mark.parametrize("damaged", [0, 1])
def test_one_that_is_damaged_in_one_process_is_passed_over_by_both(damaged: int, tmp_path: Path) -> None:
    for rank in range(2):
        save(tmp_path, rank, 1, 2)
    path = tmp_path / "snapshots" / f"rank-{damaged}-of-2" / "000002-update-00000020.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    starts = together(tmp_path)
    assert numbers(starts) == [(1, 2), (1, 2)]
    for start in starts:
        assert isinstance(start, RunStart)
        assert start.chosen is not None
        ((refused),) = start.chosen.refused
        assert refused.why.startswith(f"rank {damaged}: ")
        assert "checksum" in refused.why


def test_of_two_runs_the_processes_have_nothing_in_common(tmp_path: Path) -> None:
    save(tmp_path, 0, 3)
    save(tmp_path, 1, 2)
    for text in numbers(together(tmp_path)):
        assert text.startswith("the 2 processes have no snapshot in common in ")
    assert numbers(together(tmp_path, first=True)) == [(None, 3), (None, 3)]


def test_a_run_that_begins_anew_numbers_on_as_one(tmp_path: Path) -> None:
    save(tmp_path, 0, 3)
    assert numbers(together(tmp_path, resume=False)) == [(None, 3), (None, 3)]


def test_another_number_of_processes_is_named(tmp_path: Path) -> None:
    save(tmp_path, 0, 3)
    save(tmp_path, 1, 3)
    with pytest.raises(SnapshotError, match="holds the snapshots of 2 processes, and this is one"):
        choose_start(asked(tmp_path, ranks=1))


def test_a_run_that_resumes_itself_may_be_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert choose_start(asked(tmp_path, ranks=1, first=True)) == RunStart(None, 0)
    assert "no snapshot to resume" in capsys.readouterr().err
    with pytest.raises(SnapshotError, match="there is no snapshot in"):
        choose_start(asked(tmp_path, ranks=1))
