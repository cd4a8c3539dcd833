"""What goes wrong in one of two processes ends both soon, with the rank and the cause in a record and a page, and leaves nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from helpers_waiting import until
from mezzo.records import CompareRecord, RunRecord, read_record
from paths import SCRIPTS
from processes import environments

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")]

SCRIPT = str(SCRIPTS / "faulty_rank.py")
ALLOWED_S, BUSY = 15, 4
"""Time from a fault to the end of all processes, and how many times as long a machine with other work may take."""
GROUP_S = 5
"""The time-out of the script's process group."""
HANGS, STOPPED = r"faulty_rank\.py:\d+ in <lambda>", "rank [01]: (stopped by SIG(TERM|HUP)|KeyboardInterrupt)$"
COMMANDS = {"run": ["run", "--policy", "fp16"], "compare": ["compare", "--policies", "fp32,fp16", "--seeds", "1"]}
_START = "import json, os, sys\nwith open(f'words-{os.environ[\"RANK\"]}') as file: words = json.load(file)\nos.execv(words[0], words)\n"


class Job:
    """Two processes of a command, which a launcher has started."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, list[subprocess.Popen[bytes]]()
        self.variables = {"TMPDIR": str(folder / "tmp"), "OF_JOB": str(folder)}
        (folder / "tmp").mkdir(exist_ok=True)

    def start(self, words: Sequence[Sequence[str]], *, launcher: Sequence[str] | None) -> None:
        """Start ``python`` with the words of each rank; without a launcher's words, with its variables."""
        (self.folder / "start.py").write_text(_START)
        for rank, own in enumerate(words):
            (self.folder / f"words-{rank}").write_text(json.dumps([sys.executable, *own]))
        begun = [sys.executable, "start.py"]
        if launcher is None:
            commands = [(begun, env) for env in environments(len(words), launched=True)]
        else:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *launcher, "start.py"]
            commands = [(torchrun, {**os.environ, "OMP_NUM_THREADS": "1"})]
        for command, env in commands:
            with (self.folder / "printed").open("ab") as printed:
                self.started.append(
                    subprocess.Popen(
                        command,
                        cwd=self.folder,
                        env=env | self.variables,
                        stdout=printed,
                        stderr=printed,
                        start_new_session=True,
                    )
                )

    def processes(self, *words: str) -> list[int]:
        """Return the processes of this job that run, with ``words`` in their command lines."""
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                line = (place / "cmdline").read_bytes().decode().split("\0")
                ours = f"OF_JOB={self.folder}".encode() in (place / "environ").read_bytes().split(b"\0")
                of_rank = {v.decode() for v in (place / "environ").read_bytes().split(b"\0")}
            except OSError:
                continue
            if ours and all(word in line or word in of_rank for word in words):
                found.append(int(place.name))
        return found

    def mezzo(self, rank: int) -> int:
        """Return the process of ``mezzo`` of a rank."""
        return min(self.processes(f"RANK={rank}", "mezzo"))

    def until_training(self) -> None:
        until(lambda: all((self.folder / f"step-{rank}").exists() for rank in (0, 1)), "two processes that train")

    def fault(self) -> None:
        (self.folder / "fault").touch()


@contextmanager
def job(folder: Path) -> Iterator[Job]:
    one = Job(folder)
    try:
        yield one
    finally:
        for process in one.processes():
            os.kill(process, signal.SIGKILL)
        for started in one.started:
            started.wait()


def sends(number: int, *, rank: int | None) -> Callable[[Job], None]:
    """Return what sends a signal to a rank's mezzo, or to the launcher."""

    def send(one: Job) -> None:
        one.until_training()
        one.fault()
        os.kill(one.started[0].pid if rank is None else one.mezzo(rank), number)

    return send


class Case(NamedTuple):
    """A fault, and what the record says about it."""

    rank: int | None
    """To blame."""
    said: str
    """The beginning of the reason, as a regular expression."""
    script: tuple[str, ...] = ()
    """The script's words."""
    act: Callable[[Job], None] = lambda _: None
    """What happens to the processes."""
    launcher: tuple[str, ...] | None = None
    """The words of torchrun before the script; None without torchrun."""
    group_s: int = 0
    """The time-out of the process group, if the fault is noticed by it."""
    commands: str = "run"


TORCHRUN = ("--no-python", sys.executable)
BOTH = "run compare"


def in_script(what: str, said: str, rank: int = 1, **more: Any) -> Case:
    return Case(rank, said, (what, str(rank)), **more)


CASES = {
    "exception before the group": in_script("raise before the group", "ValueError: bad batch", commands="compare"),
    "exception": in_script("raise", "ValueError: bad batch"),
    "exception on rank 0": in_script("raise", "ValueError: bad batch", 0, launcher=TORCHRUN),
    "exception after the last step": in_script("raise after the last step", "ValueError: bad batch"),
    "early end": in_script(
        "sys.exit(0)", "its script ended after 4 updates, while rank 0 still waited", launcher=TORCHRUN
    ),
    "early end without Python's": in_script("os._exit(0)", "the process called os._exit", commands="compare"),
    "exit code": in_script("sys.exit(3)", "its script ended with exit code 3$", commands=BOTH),
    "exit code without Python's end": in_script("os._exit(3)", "the process died with exit code 3"),
    "kill": in_script("killed", "the process died with signal SIGKILL", commands=BOTH),
    "kill on rank 0": in_script("killed", "the process died with signal SIGKILL", 0, launcher=TORCHRUN),
    "crash": in_script("crash", "the process died with signal SIGSEGV", commands="compare"),
    "memory": in_script("memory", "RuntimeError: .*can't allocate memory"),
    "full disk": in_script("disk", r"OSError: \[Errno 28\] No space left on device$"),
    "hang before the group": in_script("hang before the group", f"it made no progress at {HANGS}", group_s=GROUP_S),
    "hang in forward": in_script(
        "hang in forward", f"it made no progress at {HANGS}", group_s=GROUP_S, commands="compare"
    ),
    "another collective": Case(None, "rank [01]: RuntimeError: ", ("another collective", "1"), group_s=GROUP_S),
    "SIGTERM to mezzo": Case(1, "stopped by SIGTERM$", act=sends(signal.SIGTERM, rank=1)),
    "SIGINT to mezzo": Case(1, "KeyboardInterrupt$", act=sends(signal.SIGINT, rank=1)),
    "SIGHUP to mezzo": Case(1, "stopped by SIGHUP$", act=sends(signal.SIGHUP, rank=1)),
    "SIGTERM to mezzo of rank 0": Case(0, "stopped by SIGTERM$", act=sends(signal.SIGTERM, rank=0), commands="compare"),
    "mezzo killed": Case(1, "its process vanished$", act=sends(signal.SIGKILL, rank=1), commands=BOTH),
    "mezzo of rank 0 killed": Case(0, "its process vanished$", act=sends(signal.SIGKILL, rank=0), launcher=TORCHRUN),
    "SIGTERM to torchrun": Case(None, STOPPED, act=sends(signal.SIGTERM, rank=None), launcher=TORCHRUN),
    "SIGINT to torchrun": Case(
        None, STOPPED, act=sends(signal.SIGINT, rank=None), launcher=TORCHRUN, commands="compare"
    ),
    "SIGHUP to torchrun": Case(None, STOPPED, act=sends(signal.SIGHUP, rank=None), launcher=TORCHRUN),
}


def errors_in(folder: Path) -> list[str]:
    """Return the errors of the runs in a record that has a page, without repetition."""
    record = read_record(folder / "record.json")
    runs = [*record.runs] if isinstance(record, CompareRecord) else [record]
    assert (folder / "report.html").exists()
    return sorted({str(run.error) for run in runs if isinstance(run, RunRecord)})


def ends(one: Job, *, group_s: int = 0) -> list[str]:
    """Wait for the end of a job that has left nothing but its record and page; return the errors of its runs, without repetition."""
    codes, ended_s = [process.wait(timeout=150) for process in one.started], time.time()
    until(lambda: not one.processes(), "the end of all processes")
    printed = (one.folder / "printed").read_text()
    print(f"ended {ended_s - (one.folder / 'fault').stat().st_mtime:.1f} s after the fault\n{printed}")
    assert ended_s - (one.folder / "fault").stat().st_mtime < group_s + ALLOWED_S * BUSY
    assert all(codes)
    assert [path.name for path in (one.folder / "tmp").iterdir() if not path.name.startswith("torch")] == []
    if "To continue, type:" not in printed:
        return errors_in(one.folder / "out")
    runs = [read_record(path) for path in one.folder.glob("out/*/record.json")]  # of a comparison that was stopped
    return sorted({str(run.error) for run in runs if isinstance(run, RunRecord)})


@pytest.mark.parametrize(
    ("name", "command"),
    [(name, command) for name, case in CASES.items() for command in COMMANDS if command in case.commands],
)
def test_a_fault_during_a_job(name: str, command: str, tmp_path: Path) -> None:
    case = CASES[name]
    words = ["-m", "mezzo", *COMMANDS[command], "--out", "out", SCRIPT, *case.script]
    with job(tmp_path) as one:
        one.start([words, words], launcher=case.launcher)
        case.act(one)
        (error,) = ends(one, group_s=case.group_s)
    assert re.match(case.said if case.rank is None else f"rank {case.rank}: {case.said}", error)


OTHER_TORCH = """
import sys
from mezzo import cli
from mezzo.launch.ranks import meeting
versions = {**meeting._versions(), "torch": "2.0.0"}
meeting._versions = lambda: versions
sys.exit(cli.main())
"""
UNEQUAL: list[tuple[str, str, Callable[[list[str]], list[str]], str]] = [
    # what differs, the command, the words of rank 1 from those of rank 0, and what is said
    ("policy", "run", lambda words: [word.replace("fp16", "bf16") for word in words], "bf16, where rank 0 has fp16"),
    (
        "policy",
        "compare",
        lambda words: [word.replace("fp16", "bf16") for word in words],
        "fp32,bf16, where rank 0 has",
    ),
    ("arguments", "run", lambda words: [*words, "raise"], "mezzo run .* raise, and rank 0 with mezzo run"),
    ("command", "compare", lambda words: [*words[:2], "audit", *words[3:]], "audit, where rank 0 has compare;"),
    (
        "folder",
        "run",
        lambda words: ["other" if word == "out" else word for word in words],
        "other, where rank 0 has out;",
    ),
    (
        "script",
        "compare",
        lambda words: [*words[:-1], "nowhere.py"],
        "nowhere.py, where rank 0 has .*faulty_rank.py'?;",
    ),
    ("torch", "run", lambda words: ["-c", OTHER_TORCH, *words[2:]], r"torch 2\.0\.0, where rank 0 has "),
]


@pytest.mark.parametrize(("what", "command", "changed", "said"), UNEQUAL)
def test_unequal_starts(
    what: str, command: str, changed: Callable[[list[str]], list[str]], said: str, tmp_path: Path
) -> None:
    words = ["-m", "mezzo", *COMMANDS[command], "--out", "out", SCRIPT]
    with job(tmp_path) as one:
        one.fault()
        one.start([words, changed(words)], launcher=TORCHRUN if what == "policy" else None)
        (error,) = ends(one)
    assert re.match(f"rank 1 of 2 was started with {said}", error)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("to", "number", "command"),
    [
        ("mezzo", signal.SIGTERM, "run"),
        ("mezzo", signal.SIGINT, "compare"),
        ("torchrun", signal.SIGINT, "run"),
        ("torchrun", signal.SIGTERM, "compare"),
        ("torchrun", signal.SIGHUP, "run"),
    ],
)
def test_a_signal_while_rank_1_has_not_joined(to: str, number: int, command: str, tmp_path: Path) -> None:
    words = ["-m", "mezzo", *COMMANDS[command], "--out", "out", SCRIPT]
    with job(tmp_path) as one:
        one.start([words, ["-c", "import time; time.sleep(1000)"]], launcher=TORCHRUN)
        until(lambda: [*(tmp_path / "tmp").glob("mezzo-*/job-*/alive-0")], "a rank 0 that waits")
        one.fault()
        os.kill(one.mezzo(0) if to == "mezzo" else one.started[0].pid, number)
        errors = ends(one)
    assert errors == [f"stopped by {signal.Signals(number).name} while it waited for rank 1 of 2"]


@pytest.mark.parametrize(
    ("command", "before", "after"),
    [
        (COMMANDS["run"], ["rank 1: ValueError: the first attempt"], ["None"]),
        ([*COMMANDS["compare"], "--gpus", "none"], ["None", "rank 1: ValueError: the first attempt"], ["None"]),
    ],
)
def test_a_restart_keeps_the_record_of_the_attempt_that_failed(
    command: list[str], before: list[str], after: list[str], tmp_path: Path
) -> None:
    words = ["-m", "mezzo", *command, "--out", "out", SCRIPT, "fail once", "1"]
    with job(tmp_path) as one:
        one.start([words, words], launcher=("--max-restarts", "1", *TORCHRUN))
        assert one.started[0].wait(timeout=150) == 0
    assert errors_in(tmp_path / "out" / "attempt-1") == before
    assert errors_in(tmp_path / "out") == after


def test_a_signal_while_the_record_is_written(tmp_path: Path) -> None:
    words = ["-m", "mezzo", *COMMANDS["run"], "--out", "out", SCRIPT, "nothing", "1"]
    with job(tmp_path) as one:
        one.start([words, words], launcher=TORCHRUN)
        until(lambda: (tmp_path / "out" / "record.json").exists(), "a record")
        one.started[0].terminate()
        assert ends(one) == ["None"]
