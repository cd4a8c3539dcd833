"""Which rank is to blame for a run that failed, as a table of how each ended."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

import pytest

from mezzo.launch.ranks import blame
from mezzo.launch.ranks.blame import POSITION_SIGNAL, ProcessEnd, ScriptPosition, blamed, is_about_peer, position_in

RESET = "RuntimeError: [pair.cc:537] Read error [127.0.0.1]:26539: Connection reset by peer"
KILLED = "the process died with signal SIGKILL before it could write a record"
STOPPED = "stopped by SIGTERM"


def end(rank: int, error: str | None = None, **more: Any) -> ProcessEnd:
    return ProcessEnd(rank=rank, error=error, **more)


def stopped(rank: int, where: str = "", *, waiting: bool = False, **more: Any) -> ProcessEnd:
    return end(rank, STOPPED, stopped=True, where=where, waiting=waiting, **more)


LATE, BAD = "ValueError: late", "ValueError: bad batch"
TIMED_OUT = "DistBackendError: Timed out waiting 1800000ms for recv"
AT, LOAD, ENDED = "it made no progress at", "data.py:3 in load", "its script ended with exit code 3"
FEWER = (
    "its script ended after 12 updates, while {} still waited for it: give all processes as many batches, or use join()"
)
CASES: dict[str, tuple[list[ProcessEnd], tuple[int, str] | None]] = {
    "all well": ([end(0), end(1)], None),
    "all end with the script's own exit code": ([end(0, exit_code=3), end(1, exit_code=3)], None),
    "one ends with an exit code, the other loses it": (
        [end(0, RESET, exit_code=1, at_s=1.0, updates=4), end(1, exit_code=3, at_s=2.0, updates=4)],
        (1, ENDED),
    ),
    "one ends with an exit code, the other well": ([end(0), end(1, exit_code=3)], (1, ENDED)),
    "one raises, the other loses its peer first": ([end(0, RESET, at_s=1.0), end(1, BAD, at_s=2.0)], (1, BAD)),
    "one is killed": ([end(0, RESET, at_s=2.0), end(1, KILLED, at_s=1.0)], (1, KILLED)),
    "two raise: the first": ([end(0, LATE, at_s=2.0), end(1, BAD, at_s=1.0)], (1, BAD)),
    "only peers are missed": ([end(0, RESET, at_s=2.0), end(1, RESET, at_s=1.0)], (1, RESET)),
    "one vanished": ([end(0, RESET, at_s=2.0), end(1, vanished=True)], (1, "its process vanished")),
    "one hangs, the other waits": (
        [stopped(0, "train.py:9", waiting=True), stopped(1, LOAD)],
        (1, f"{AT} {LOAD}, with rank 0 at train.py:9"),
    ),
    "one hangs, the others read a number from a device": (
        [stopped(rank, "data.py:3" if rank == 2 else "train.py:9") for rank in range(4)],
        (2, f"{AT} data.py:3, with ranks 0, 1, 3 at train.py:9"),
    ),
    "one hangs until the other's time-out": (
        [end(0, TIMED_OUT, at_s=1.0), stopped(1, "data.py:3")],
        (1, f"{AT} data.py:3"),
    ),
    "one waits, the other says nothing": (
        [stopped(0, "train.py:9", waiting=True), stopped(1)],
        (1, "it made no progress, with rank 0 at train.py:9"),
    ),
    "nobody says where it is": ([stopped(0), stopped(1)], (0, "it made no progress")),
    "all wait for each other": (
        [stopped(rank, f"train.py:{rank}", waiting=True) for rank in range(2)],
        (0, f"{AT} train.py:0, with rank 1 at train.py:1"),
    ),
    "one has fewer batches, the other loses it": (
        [end(0, RESET, at_s=1.0, updates=12), end(1, updates=12, at_s=2.0)],
        (1, f"{FEWER.format('rank 0')} ({RESET})"),
    ),
    "one has fewer batches, the others wait until they are stopped": (
        [*(stopped(rank, "train.py:9", waiting=True, updates=13) for rank in range(2)), end(2, updates=12)],
        (2, FEWER.format("ranks 0, 1")),
    ),
    "one ends well, the other hangs": (
        [stopped(0, "data.py:3", updates=3), end(1, updates=3)],
        (0, f"{AT} data.py:3"),
    ),
    "one raises of itself, the other has ended": ([end(0, BAD, updates=13), end(1, updates=12)], (0, BAD)),
    "one ends well after more updates": ([end(0, RESET, updates=3), end(1, updates=12)], (0, RESET)),
    "one raises, the other goes on and is stopped": ([stopped(0, "train.py:9"), end(1, BAD, at_s=1.0)], (1, BAD)),
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


# --- Where a hanging process is, from the traceback that faulthandler writes ---


HEAD = 'Thread 0x00007f (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 5 in wait\n\n'
TORCH = "/venv/lib/python3.11/site-packages/torch"


def frames(*places: tuple[str, str]) -> str:
    return "".join(f'  File "{file}", line {line}\n' for file, line in places)


MAIN, TRAIN = ("/home/me/train.py", "7 in main"), ("/home/me/train.py", "9 in <module>")
ENGINE = [(f"{TORCH}/autograd/graph.py", "865 in _engine_run_backward"), (f"{TORCH}/_tensor.py", "1 in backward")]
TEXTS = [
    (frames(("/home/me/data.py", "3 in load"), TRAIN), ("data.py:3 in load", False)),
    (frames(*ENGINE, TRAIN), ("train.py:9", True)),
    (frames((f"{TORCH}/distributed/distributed_c10d.py", "2 in all_reduce"), MAIN), ("train.py:7 in main", True)),
    (frames((f"{TORCH}/utils/data/dataloader.py", "2 in _next_data"), MAIN), ("train.py:7 in main", False)),
    (frames((f"{TORCH}/_ops.py", "2 in call")), ("", False)),
    (frames((blame.__file__, "2 in f"), ("/home/me/a b/mezzo/train.py", "9 in <module>")), ("train.py:9", False)),
    ("", ("", False)),
]


@pytest.mark.parametrize(("text", "found"), TEXTS)
def test_the_innermost_line_of_the_script(text: str, found: tuple[str, bool], tmp_path: Path) -> None:
    path = tmp_path / "run.position"
    path.write_text(f"{HEAD}Current thread 0x00007f (most recent call first):\n{text}")
    assert position_in(path) == ScriptPosition(*found)


def test_no_file_is_no_position(tmp_path: Path) -> None:
    assert position_in(tmp_path / "none") == ScriptPosition("", False)


SLEEPS = """
import sys, threading, time
from pathlib import Path
from mezzo.launch.ranks.blame import write_position_on_signal
write_position_on_signal(Path(sys.argv[1]))
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
def load():
    time.sleep(60)
load()
"""


@pytest.mark.skipif(POSITION_SIGNAL is None, reason="no real-time signals")
def test_the_file_is_there_only_once_the_process_can_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal ends a process that has no handler for it yet."""
    path, there = tmp_path / "run.position", list[bool]()

    def register(number: int, *, file: TextIO, all_threads: bool) -> None:
        there.append(path.exists())
        file.close()

    monkeypatch.setattr(blame.faulthandler, "register", register)
    blame.write_position_on_signal(path)
    assert (there, list(tmp_path.iterdir())) == ([False], [path])


@pytest.mark.skipif(POSITION_SIGNAL is None, reason="no real-time signals")
def test_a_process_that_sleeps_answers(tmp_path: Path) -> None:
    script, path = tmp_path / "train.py", tmp_path / "run.position"
    script.write_text(SLEEPS)
    process = subprocess.Popen([sys.executable, str(script), str(path)])
    try:
        end = time.monotonic() + 120
        while time.monotonic() < end and not position_in(path).where.endswith("in load"):
            if path.exists():
                process.send_signal(POSITION_SIGNAL or 0)
            time.sleep(0.05)
        assert position_in(path) == ScriptPosition("train.py:8 in load", False)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("late_s", [0.0, 1.5], ids=["at once", "late"])
def test_a_slowly_written_traceback_is_read_whole(late_s: float, tmp_path: Path) -> None:
    """A process on a busy machine: its other threads are written first, its main thread last."""
    path = tmp_path / "run.position"
    path.touch()

    def write() -> None:
        time.sleep(late_s)
        with path.open("w", buffering=1) as file:
            for n in range(10):
                file.write(
                    HEAD if n < 9 else 'Current thread 0x1 (most recent call first):\n  File "a.py", line 9 in f\n'
                )
                time.sleep(0.02)

    writer = threading.Thread(target=write)
    writer.start()
    blame.wait_for_position(path)
    assert position_in(path) == ScriptPosition("a.py:9 in f", False)
    writer.join()
