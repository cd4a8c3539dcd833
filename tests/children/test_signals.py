"""Signals, with true processes: what a command passes on to its run, what ends with it, and what is kept."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers_launch import children_in_this_process
from helpers_waiting import LONGEST_S, until
from mezzo import cli
from mezzo.children import guard
from mezzo.children.signals import Guarded
from mezzo.records import CompareRecord, DiagnoseRecord, FallbackRecord, RunRecord, read_record
from paths import FAULTS

pytestmark = [
    pytest.mark.slow,  # they start and kill processes
    pytest.mark.skipif(sys.platform != "linux", reason="the whole tree of a run is known on Linux only"),
]


def runs(process: int) -> bool:
    """Return whether a process runs; one that has ended may wait for its parent."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def numbers(path: Path, count: int) -> list[int]:
    """Return the process numbers that a script wrote to a file, when they are all there."""
    return until(lambda: _numbers(path, count), f"{count} numbers in {path}")


def _numbers(path: Path, count: int) -> list[int]:
    found = path.read_text().split("\n")[:-1] if path.exists() else []
    return [int(word) for word in found] if len(found) >= count else []


@pytest.fixture(autouse=True)
def _hears_everything() -> Iterator[None]:
    """Hear what a shell's background job or nohup ignores, since child processes would ignore it as well."""
    before = {number: signal.getsignal(number) for number in guard.STOPPING}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# --- a command and its run, without torch ------------------------------------------------------------------------------------

COMMAND = """
import sys
from mezzo.children import signals as stopping
from mezzo.children.signals import Guarded
stopping._SECOND_GRACE_S, stopping._SAME_SIGNAL_S = 0.2, 0.05
handle = stopping.Stop.handle
def heard(self, number, frame=None):
    handle(self, number, frame)
    with open("heard", "a") as file:
        file.write(f"{number}\\n")
stopping.Stop.handle = heard
with stopping.stoppable() as stop:
    process = Guarded([sys.executable, *sys.argv[1:]], stdout=None, stderr=None)
    with stop.passing_to(process):
        returned = process.wait()
print("returned", returned, "exit code", stop.exit_code, flush=True)
"""

SCRIPT = """
import os, signal, subprocess, sys, time
heard = []
def note(text):
    with open("numbers", "a") as file:
        file.write(f"{text}\\n")
"""


@contextlib.contextmanager
def command(folder: Path, script: str) -> Iterator[subprocess.Popen[str]]:
    """Start a command that runs ``script``."""
    (folder / "script.py").write_text(textwrap.dedent(SCRIPT) + textwrap.dedent(script))
    words = [sys.executable, "-c", COMMAND, "script.py"]
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        yield process
        if process.poll() is None:
            process.kill()


WAITS = """
note(os.getpid())
while True:
    time.sleep(0.01)
"""

EXITS = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))" + WAITS
IGNORES = "for n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)" + WAITS
NATIVE = """
note(os.getpid()); from itertools import repeat; from collections import deque
for n in (2, 15, 62, 63): signal.signal(n, lambda *_: None)
deque(repeat(0), maxlen=0)
"""
FINAL = f"returned -{guard.FINAL_SIGNAL}"
ENDINGS: list[tuple[str, str, list[int], str]] = [
    # script, how it takes signals, what is sent to the command, what the command says in the end
    (WAITS, "as python does", [signal.SIGTERM], "returned -15 exit code 143"),
    (WAITS, "as python does", [signal.SIGHUP], "returned -1 exit code 129"),
    (WAITS, "as python does", [signal.SIGUSR1], "returned -10 exit code 0"),
    (EXITS, "in its own way", [signal.SIGTERM], "returned 7 exit code 143"),
    # A run that ignores SIGTERM is sent the final signal immediately, and this one has no handler for it.
    (IGNORES, "not at all", [signal.SIGTERM], f"{FINAL} exit code 143"),
    (IGNORES, "not at all", [signal.SIGINT, signal.SIGINT], f"{FINAL} exit code 130"),
    (NATIVE, "in native code that never returns", [signal.SIGINT] * 3, "returned -9 exit code 130"),
]


@pytest.mark.parametrize(
    ("script", "how", "sent", "said"), ENDINGS, ids=lambda value: value if isinstance(value, str) else None
)
def test_how_a_run_ends(tmp_path: Path, script: str, how: str, sent: list[int], said: str) -> None:
    with command(tmp_path, script) as process:
        [run] = numbers(tmp_path / "numbers", 1)
        for nth, number in enumerate(sent):
            if nth:
                numbers(tmp_path / "heard", nth)
                time.sleep(0.06)  # nearer to each other they count as one
            process.send_signal(number)
        assert process.communicate(timeout=LONGEST_S)[0].strip() == said
    assert not runs(run)


STUBBORN = """
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(1000)"
"""
GENTLE = """
STUBBORN = "import time; print(flush=True); time.sleep(1000)"
"""
FAMILY = """
    note(os.getpid())
    sleeps = "import time; time.sleep(1000)"
    below = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {sleeps!r}]); print(p.pid, flush=True); p.wait()"
    child = subprocess.Popen([sys.executable, "-c", below], stdout=subprocess.PIPE, text=True)
    note(child.pid)
    note(child.stdout.readline().strip())
    apart = subprocess.Popen([sys.executable, "-c", STUBBORN], start_new_session=True, stdout=subprocess.PIPE)
    apart.stdout.readline()
    note(apart.pid)
    if os.fork() == 0:  # what no longer has a parent in the run
        if os.fork():
            os._exit(0)
        note(os.getpid())
        time.sleep(1000)
    while True:
        time.sleep(0.01)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL], ids=lambda n: n.name)
def test_what_a_run_has_started_ends_with_it(tmp_path: Path, number: signal.Signals) -> None:
    kind = STUBBORN if number == signal.SIGTERM else GENTLE  # one that is waited for is enough
    with command(tmp_path, kind + textwrap.dedent(FAMILY)) as process:
        family = numbers(tmp_path / "numbers", 5)
        assert all(map(runs, family))
        process.send_signal(number)
        process.wait(LONGEST_S)
        until(lambda: not any(map(runs, family)), f"the ends of {family}")


def test_the_run_ends_with_its_guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT) + WAITS)
    process = Guarded([sys.executable, str(tmp_path / "script.py")], stdout=None, stderr=None)
    monitored = process._process
    (run,) = until(lambda: guard._children().get(monitored.pid), "the run")
    monitored.kill()
    until(lambda: not runs(run), "its end")
    assert process.wait() == -signal.SIGKILL


def test_a_run_that_ends_by_itself_leaves_others_alone(tmp_path: Path) -> None:
    script = "note(subprocess.Popen(['sleep', '1000'], stdout=subprocess.DEVNULL).pid); sys.exit(3)"
    with command(tmp_path, script) as process:
        assert process.communicate(timeout=LONGEST_S)[0].strip() == "returned 3 exit code 0"
    [left] = numbers(tmp_path / "numbers", 1)
    assert runs(left)
    os.kill(left, signal.SIGKILL)


def test_what_nohup_ignores_stays_ignored(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        textwrap.dedent(SCRIPT) + "note(os.getpid())\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
    )
    words = ["nohup", sys.executable, "-c", COMMAND, "script.py"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        [run] = numbers(tmp_path / "numbers", 1)
        for number in (process.pid, run):
            os.kill(number, signal.SIGHUP)
        (tmp_path / "go").touch()
        assert process.communicate(timeout=LONGEST_S)[0].strip() == "returned 0 exit code 0"


def test_no_module_of_the_guards_folder_hides_one_of_pythons() -> None:
    names = {path.stem for path in Path(guard.__file__).parent.glob("*")}
    assert names & set(sys.stdlib_module_names) == set()


# --- in a terminal -----------------------------------------------------------------------------------------------------------


SHELL = """
import fcntl, os, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
"""


PYTHON = shlex.quote(sys.executable)


class Terminal:
    """Be a person at a shell."""

    def __init__(self, folder: Path) -> None:
        self._end, theirs = pty.openpty()
        variables = {**os.environ, "PS1": "$ ", "TERM": "dumb"}
        streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        words = [sys.executable, "-c", SHELL]
        self._shell = subprocess.Popen(words, cwd=folder, env=variables, **streams, start_new_session=True)
        os.close(theirs)
        self._text = ""

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def read(self, pattern: str) -> str:
        """Wait for a line; return what its group holds."""

        def found() -> re.Match[str] | None:
            if select.select([self._end], [], [], 0.0)[0]:
                self._text += os.read(self._end, 65536).decode(errors="replace").replace("\r", "")
            return re.search(pattern, self._text)

        match = until(found, pattern)
        self._text = self._text[match.end() :]
        return str(match.group(match.lastindex or 0))

    def close(self) -> None:
        os.close(self._end)
        self._shell.wait(LONGEST_S)


needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    (tmp_path / "command.py").write_text(COMMAND)
    held = Terminal(tmp_path)
    yield held
    held.close()


COUNTS = """
    signal.signal(signal.SIGINT, lambda *_: heard.append(1))
    print("count", "ing", os.getpid(), sep="", flush=True)
    while not heard:
        time.sleep(0.01)
    time.sleep(0.5)  # a second one would come now
    print("heard", len(heard), "times", flush=True)
"""


@needs_bash
@pytest.mark.parametrize("stdin", ["", " < /dev/null"], ids=["from the terminal", "from a file"])
def test_ctrl_c_is_heard_once(tmp_path: Path, terminal: Terminal, stdin: str) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT) + textwrap.dedent(COUNTS))
    terminal.type(f"{PYTHON} command.py script.py{stdin}\n")
    terminal.read(r"counting\d+")
    terminal.type("\x03")
    assert terminal.read(r"heard (\d+) times") == "1"
    assert terminal.read(r"returned (.*)") == "0 exit code 130"


@needs_bash
def test_a_signal_to_the_command_alone_reaches_the_run_in_a_terminal_too(tmp_path: Path, terminal: Terminal) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT) + textwrap.dedent(COUNTS))
    terminal.type(f"{PYTHON} command.py script.py & echo number=$!.\n")
    process = int(terminal.read(r"number=(\d+)\."))
    terminal.read(r"counting\d+")
    os.kill(process, signal.SIGINT)
    assert terminal.read(r"heard (\d+) times") == "1"


@needs_bash
def test_ctrl_z_and_fg_and_standard_input(tmp_path: Path, terminal: Terminal) -> None:
    script = "print('ask', 'ing', sep='', flush=True)\nprint('read', sys.stdin.readline(), flush=True)\n"
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT) + script)
    terminal.type(f"{PYTHON} command.py script.py\n")
    terminal.read("asking")
    terminal.type("\x1a")
    terminal.read("Stopped")
    terminal.type("fg\n")
    terminal.read(r"fg\n.*command\.py script\.py")  # before that, the shell would read what is typed next
    terminal.type("Ada\n")
    terminal.read("read Ada")
    assert terminal.read(r"returned (.*)") == "0 exit code 0"


@needs_bash
def test_a_terminal_that_is_closed_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "command.py").write_text(COMMAND)
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT) + GENTLE + textwrap.dedent(FAMILY))
    terminal = Terminal(tmp_path)
    terminal.type(f"{PYTHON} command.py script.py\n")
    family = numbers(tmp_path / "numbers", 5)
    assert list(map(runs, family)) == [True] * 5
    terminal.close()
    until(lambda: not any(map(runs, family)), f"the ends of {family}")
    assert list(map(runs, family)) == [False] * 5


# --- commands and their records ----------------------------------------------------------------------------------------------

TRAINS = """
    import os, sys, time, torch
    from torch.utils.data import DataLoader
    HANGS = not os.path.exists("hangs only if this has a record") or os.path.exists("out/fp32-seed0/record.json")

    class Numbers(torch.utils.data.Dataset):
        def __len__(self):
            return 60
        def __getitem__(self, place):
            if place in (0, 2) and HANGS:
                with open("numbers", "a") as file:
                    file.write(f"{os.getpid()}\\n")
            if place > 40 and HANGS:
                time.sleep(1000)
            return torch.ones(2)

    if __name__ == "__main__":
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step, inputs in enumerate(DataLoader(Numbers(), batch_size=2, num_workers=2)):
            optimizer.zero_grad()
            model(inputs).pow(2).mean().backward()
            optimizer.step()
            if step == 10 and HANGS:
                open("trained", "w").close()
"""


@contextlib.contextmanager
def mezzo(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    (folder / "train.py").write_text(textwrap.dedent(TRAINS))
    command = [sys.executable, "-m", "mezzo", *words]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        yield process
        if process.poll() is None:
            process.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)], ids=["SIGTERM", "SIGKILL"])
def test_a_run_with_workers_that_load_data(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with mezzo(tmp_path, "run", "--policy", "fp32", "--out", "out", "train.py") as process:
        workers = numbers(tmp_path / "numbers", 2)
        until(lambda: (tmp_path / "trained").exists(), "ten steps")
        assert all(map(runs, workers))
        process.send_signal(number)
        process.communicate(timeout=LONGEST_S)
        assert process.returncode == code
        until(lambda: not any(map(runs, workers)), f"the ends of {workers}")
    if number == signal.SIGTERM:
        record = read_record(tmp_path / "out" / "record.json")
        assert isinstance(record, RunRecord)
        assert (record.exit_code, record.error) == (143, "stopped by SIGTERM")
        assert 10 <= len(record.steps) <= 21
        assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)], ids=["SIGINT", "SIGKILL"])
def test_a_comparison_keeps_the_runs_that_have_ended(tmp_path: Path, number: signal.Signals, code: int) -> None:
    (tmp_path / "hangs only if this has a record").touch()
    words = ["compare", "--policies", "fp32,bf16", "--seeds", "1", "--out", "out", "train.py"]
    with mezzo(tmp_path, *words) as process:
        workers = numbers(tmp_path / "numbers", 2)
        process.send_signal(number)
        process.communicate(timeout=LONGEST_S)
        assert process.returncode == code
        until(lambda: not any(map(runs, workers)), f"the ends of {workers}")
    if number == signal.SIGINT:
        record = read_record(tmp_path / "out" / "record.json")
        assert isinstance(record, CompareRecord)
        assert [(run.policy, run.exit_code, len(run.steps)) for run in record.runs] == [("fp32", 0, 30)]
        assert (tmp_path / "out" / "report.html").exists()


SLOW_TO_TRACE = """
import os, time, torch

if torch.cuda.is_available():  # only the GPU that a prediction simulates
    with open("tracing", "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(600)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 2)).square().mean().backward()
    optimizer.step()
"""


COMPARE = ["compare", "--policies", "fp32,bf16", "--seeds", "1", "--gpus", "t4"]
PREDICT = ["predict", "--gpus", "t4", "--policies", "fp32"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the runs themselves would wait")
@pytest.mark.parametrize("words", [COMPARE, PREDICT], ids=["compare", "predict"])
def test_a_prediction_ends_with_its_command(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "train.py").write_text(SLOW_TO_TRACE)
    command = [sys.executable, "-m", "mezzo", *words, "--out", "out", "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            tracing = numbers(tmp_path / "tracing", 1)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=LONGEST_S)
        finally:
            process.kill()
    assert process.returncode == 143
    until(lambda: not any(map(runs, tracing)), f"the end of {tracing}")
    if words[0] == "compare":
        record = read_record(tmp_path / "out" / "record.json")
        assert isinstance(record, CompareRecord)
        assert [run.policy for run in record.runs] == ["fp32", "bf16"]
        assert record.real_gpus is None


# Each row: the command, the number of the run that the signal comes in, how many runs there are then, the kind of the record.
STOPS = [
    (["diagnose", "late_log"], 1, 1, DiagnoseRecord),
    (["diagnose", "late_log"], 2, 2, DiagnoseRecord),
    (["audit", "healthy_few_skips"], 1, 1, None),
    (["ranges", "healthy_few_skips"], 1, 1, None),
    (["fallback", "healthy_few_skips"], 2, 2, RunRecord),
    (["compare", "healthy_few_skips"], 2, 2, CompareRecord),
]


INT, TERM = (signal.SIGINT, 130), (signal.SIGTERM, 143)


@pytest.mark.parametrize(
    ("words", "nth", "count", "kind", "number", "code"),
    [*((*stop, *INT) for stop in STOPS), *((*stop, *TERM) for stop in (STOPS[1], STOPS[5]))],
)
def test_no_run_is_begun_after_a_signal(
    tmp_path: Path, words: list[str], nth: int, count: int, kind: type[Any] | None, number: signal.Signals, code: int
) -> None:
    begun = []

    def before() -> None:
        begun.append(1)
        if len(begun) == nth:
            os.kill(os.getpid(), number)

    script = str(FAULTS / "faults.py")
    with children_in_this_process(before_each=before):
        assert cli.main([words[0], "--out", str(tmp_path), script, *words[1:]]) == code
    assert len(begun) == count
    record = read_record(tmp_path / "record.json")
    assert not isinstance(record, FallbackRecord)
    assert kind is None or isinstance(record, kind)
