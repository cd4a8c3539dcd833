"""Where a hanging process is, from the traceback that faulthandler writes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

import pytest

from mezzo.launch.ranks import blame
from mezzo.launch.ranks.blame import POSITION_SIGNAL, ScriptPosition, position_in

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
