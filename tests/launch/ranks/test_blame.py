"""Which rank is to blame for a run that failed, as a table of how each ended."""

from __future__ import annotations

from typing import Any

import pytest

from mezzo.launch.ranks.blame import ProcessEnd, blamed, is_about_peer

RESET = "RuntimeError: [pair.cc:537] Read error [127.0.0.1]:26539: Connection reset by peer"
KILLED = "the process died with signal SIGKILL before it could write a record"
STOPPED = "stopped by SIGTERM"


def end(rank: int, error: str | None = None, **more: Any) -> ProcessEnd:
    return ProcessEnd(rank=rank, error=error, **more)


CASES: dict[str, tuple[list[ProcessEnd], tuple[int, str] | None]] = {
    "all well": ([end(0), end(1)], None),
    "all end with the script's own exit code": ([end(0, exit_code=3), end(1, exit_code=3)], None),
    "one ends with an exit code, the other loses it": (
        [end(0, RESET, exit_code=1, at_s=1.0, updates=4), end(1, exit_code=3, at_s=2.0, updates=4)],
        (1, "its script ended with exit code 3"),
    ),
    "one ends with an exit code, the other well": (
        [end(0), end(1, exit_code=3)],
        (1, "its script ended with exit code 3"),
    ),
    "one raises, the other loses its peer first": (
        [end(0, RESET, at_s=1.0), end(1, "ValueError: bad batch", at_s=2.0)],
        (1, "ValueError: bad batch"),
    ),
    "one is killed": ([end(0, RESET, at_s=2.0), end(1, KILLED, at_s=1.0)], (1, KILLED)),
    "two raise: the first": (
        [end(0, "ValueError: late", at_s=2.0), end(1, "KeyError: early", at_s=1.0)],
        (1, "KeyError: early"),
    ),
    "only peers are missed": ([end(0, RESET, at_s=2.0), end(1, RESET, at_s=1.0)], (1, RESET)),
    "one vanished": ([end(0, RESET, at_s=2.0), end(1, vanished=True)], (1, "its process vanished")),
    "one hangs, the other waits": (
        [
            end(0, STOPPED, stopped=True, where="train.py:9", waiting=True),
            end(1, STOPPED, stopped=True, where="data.py:3 in load"),
        ],
        (1, "it made no progress at data.py:3 in load, with rank 0 at train.py:9"),
    ),
    "one hangs, the others read a number from a device": (
        [end(rank, STOPPED, stopped=True, where="data.py:3" if rank == 2 else "train.py:9") for rank in range(4)],
        (2, "it made no progress at data.py:3, with ranks 0, 1, 3 at train.py:9"),
    ),
    "one hangs until the other's time-out": (
        [
            end(0, "DistBackendError: Timed out waiting 1800000ms for recv", at_s=1.0),
            end(1, STOPPED, stopped=True, where="data.py:3"),
        ],
        (1, "it made no progress at data.py:3"),
    ),
    "one waits, the other says nothing": (
        [end(0, STOPPED, stopped=True, where="train.py:9", waiting=True), end(1, STOPPED, stopped=True)],
        (1, "it made no progress, with rank 0 at train.py:9"),
    ),
    "nobody says where it is": (
        [end(0, STOPPED, stopped=True), end(1, STOPPED, stopped=True)],
        (0, "it made no progress"),
    ),
    "all wait for each other": (
        [end(rank, STOPPED, stopped=True, where=f"train.py:{rank}", waiting=True) for rank in range(2)],
        (0, "it made no progress at train.py:0, with rank 1 at train.py:1"),
    ),
    "one has fewer batches, the other loses it": (
        [end(0, RESET, at_s=1.0, updates=12), end(1, updates=12, at_s=2.0)],
        (
            1,
            "its script ended after 12 updates, while rank 0 still waited for it: give all processes as many batches, or use "
            f"join() ({RESET})",
        ),
    ),
    "one has fewer batches, the others wait until they are stopped": (
        [
            *(end(rank, STOPPED, stopped=True, where="train.py:9", waiting=True, updates=13) for rank in range(2)),
            end(2, updates=12),
        ],
        (
            2,
            "its script ended after 12 updates, while ranks 0, 1 still waited for it: give all processes as many batches, or use "
            "join()",
        ),
    ),
    "one ends well, the other hangs": (
        [end(0, STOPPED, stopped=True, where="data.py:3", updates=3), end(1, updates=3)],
        (0, "it made no progress at data.py:3"),
    ),
    "one raises of itself, the other has ended": (
        [end(0, "ValueError: bad batch", updates=13), end(1, updates=12)],
        (0, "ValueError: bad batch"),
    ),
    "one ends well after more updates": ([end(0, RESET, updates=3), end(1, updates=12)], (0, RESET)),
    "one raises, the other goes on and is stopped": (
        [end(0, STOPPED, stopped=True, where="train.py:9"), end(1, "ValueError: bad batch", at_s=1.0)],
        (1, "ValueError: bad batch"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_rank_to_blame(name: str) -> None:
    ends, found = CASES[name]
    assert blamed(ends) == found


@pytest.mark.parametrize(
    ("error", "noticed"),
    [
        (RESET, True),
        ("RuntimeError: Connection closed by peer [127.0.0.1]:4499", True),
        ("torch.distributed.DistNetworkError: The client socket has timed out", True),
        ("DistBackendError: NCCL error in: ProcessGroupNCCL.cpp", True),
        ("ValueError: bad batch", False),
        (KILLED, False),
        ("the loss is nan before the first update", False),
        ("OutOfMemoryError: CUDA out of memory", False),
    ],
)
def test_errors_of_processes_that_miss_another(error: str, noticed: bool) -> None:
    assert is_about_peer(error) is noticed
