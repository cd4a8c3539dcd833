"""Runs that are forked from one process: a script sees what it sees in a process of its own, or gets one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from helpers_launch import Display
from helpers_waiting import until
from mezzo import cli
from mezzo.children import fork_server as ready
from mezzo.children.fork_server import Starter
from mezzo.children.signals import Guarded
from mezzo.errors import ScriptError
from mezzo.launch import runner
from mezzo.launch.progress import shown_on
from mezzo.launch.request import Request
from mezzo.launch.runner import import_ahead, run_child, shared_imports
from mezzo.records import RunRecord

pytestmark = [
    pytest.mark.slow,  # they start and kill processes
    pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked elsewhere"),
]


LOOKS = """
    import json, os, random, sys, time
    if __name__ == "__mp_main__": sys.stdout = open(os.devnull, "w")
    print("buffered", end=" ")
    os.write(1, b"written at once\\n")
    sys.stderr.write("an error\\n")
    os.system("echo from a shell")
    print(sys.stdin.readline(), end="")

    import atexit, inspect, logging, multiprocessing, signal, threading, warnings

    def double(number):
        return 2 * number + (os.getpid() == before_any_fork)

    def links():
        return {name: os.readlink(f"/proc/self/fd/{name}") for name in sorted(os.listdir("/proc/self/fd"))[:-1]}

    def stream(which):
        of = ("encoding", "errors", "line_buffering", "write_through", "mode", "name", "newlines", "closed")
        return [getattr(which, name) for name in of] + [which.fileno(), which.isatty(), which.seekable(), repr(which.buffer)]

    before_any_fork = os.getpid()
    if __name__ == "__main__":
        import numpy, torch
        from torch.utils.data import DataLoader
        main = sys.modules["__main__"]
        seen = {
            "arguments": [sys.argv, sys.orig_argv, sys.path, sys.flags, sys.warnoptions],
            "main": [__name__, __file__, sorted(vars(main)), main.__spec__, main.double is double],
            "place": [os.getcwd(), dict(os.environ), os.getpgrp(), os.getsid(0)],
            "streams": [[stream(s) for s in (sys.stdin, sys.stdout, sys.stderr)], sys.stdout is sys.__stdout__, links()],
            "signals": [getattr(h, "__qualname__", repr(h)) for h in map(signal.getsignal, signal.valid_signals())],
            "blocked signals": sorted(signal.pthread_sigmask(0, [])),
            "threads": [threading.active_count(), threading.current_thread() is threading.main_thread()],
            "depth": [len(inspect.stack()), sys.getrecursionlimit()],
            "torch": [torch.get_num_threads(), torch.cuda.is_initialized(), torch.is_grad_enabled(), str(torch.get_default_dtype())],
            "warnings": [repr(f) for f in warnings.filters if "sympy" not in repr(f)],  # torch's compiler brings it
            "logging": [logging.root.level, len(logging.root.handlers)],
            "workers": [int(sum(DataLoader(range(10), num_workers=2)))],
        }
        for method in ("fork", "spawn", "forkserver"):
            with multiprocessing.get_context(method).Pool(1) as pool:
                seen["workers"].append(pool.apply(double, (21,)))
        with open(sys.argv[1], "w") as file:
            json.dump(seen, file, default=repr)
        atexit.register(print, "at the end")
        threading.Thread(target=lambda: (time.sleep(0.05), print("in a thread"))).start()
"""

DRAWS = """
    import json, multiprocessing, os, random, sys
    import numpy, torch
    from sympy.core.random import rng
    drawn = {
        "python": random.random(),
        "numpy": numpy.random.rand(),
        "numpy's generator": numpy.random.default_rng().random(),
        "torch": torch.rand(2).tolist(),
        "torch's seed": torch.initial_seed(),
        "sympy": rng.random(),
        "key": multiprocessing.current_process().authkey.hex(),
        "number": os.getpid(),
    }
    with open(sys.argv[1], "w") as file:
        json.dump(drawn, file)
    os._exit(0)
"""


class Looks(NamedTuple):
    seen: dict[str, Any]
    printed: str
    record: RunRecord


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ready")


STARTS = """
import os, sys
if any(word.startswith("mezzo.launch.") for word in sys.orig_argv):
    print("buffered before the script")
    os.write(1, b"before the script\\n")
"""


@pytest.fixture(scope="module")
def _as_in_a_shell(place: Path) -> Iterator[None]:
    """Hear SIGINT, which a shell's background job ignores; let python buffer what it prints, and print while it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    (place / "lib").mkdir()
    (place / "lib" / "sitecustomize.py").write_text(STARTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONUNBUFFERED", raising=False)
        patch.setenv("PYTHONPATH", str(place / "lib"), prepend=os.pathsep)
        yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def _standard_input(place: Path) -> Iterator[None]:
    kept = os.dup(0)
    (place / "input").write_text("from standard input\n")
    with (place / "input").open() as file:
        os.dup2(file.fileno(), 0)
    yield
    os.dup2(kept, 0)
    os.close(kept)


@pytest.fixture(scope="module")
def starter(_as_in_a_shell: None, _standard_input: None) -> Iterator[Starter]:
    """Hold the process that has imported PyTorch for all tests of this file."""
    held = Starter(*runner._PROGRAMS)
    yield held
    held.close()
    assert held._process is not None
    assert held._process.wait() == 0


@contextlib.contextmanager
def forking(starter: Starter) -> Iterator[None]:
    token = runner._STARTER.set(starter)
    starter._surroundings = os.getcwd(), dict(os.environ)  # pytest puts the test's name there
    yield
    runner._STARTER.reset(token)
    assert starter.why_not_forked is None


def request_for(place: Path, text: str, *arguments: str) -> Request:
    script = place / "script.py"
    script.write_text(textwrap.dedent(text))
    more: dict[str, Any] = {"record_path": str(place / "record.json"), "command": ("mezzo", "compare")}
    return Request(target=str(script), kind="script", arguments=arguments, policy="fp16", **more)


def run(place: Path, text: str, *arguments: str, limit_s: float | None = None) -> RunRecord:
    return run_child(request_for(place, text, *arguments), output=place / "output.log", limit_s=limit_s)


def looks(place: Path) -> Looks:
    os.lseek(0, 0, os.SEEK_SET)
    record = run(place, LOOKS, str(place / "seen.json"))
    undated = record.environment.model_copy(update={"date": ""})
    record = record.model_copy(update={"environment": undated, "started_at_s": None, "duration_s": 0.0})
    return Looks(json.loads((place / "seen.json").read_text()), (place / "output.log").read_text(), record)


def test_a_script_sees_what_it_sees_in_a_process_of_its_own(place: Path, starter: Starter) -> None:
    own = looks(place)
    with forking(starter):
        forked = looks(place)
    for name, value in own.seen.items():
        assert forked.seen[name] == value, name
    assert forked.printed == own.printed
    assert forked.record == own.record
    first = ["before the script", "written at once", "an error", "from a shell"]
    assert own.printed.splitlines()[:6] == [*first, "buffered before the script", "buffered from standard input"]
    assert "in a thread" in own.printed
    assert own.printed.endswith("at the end\n")
    assert own.seen["workers"] == [45, 42, 43, 43]
    assert own.seen["depth"][0] > 3


TRAINS = """
    import torch
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(8, 4)).square().mean().backward()
        optimizer.step()
"""


def test_what_mezzo_sets_for_the_compiler_is_not_reported_as_the_scripts(place: Path, starter: Starter) -> None:
    with forking(starter):
        record = run(place, TRAINS)
    assert record.effective.share_by_format == {"fp16": 1.0}
    assert record.effective.left_alone == []


ENDS = """
    import gc, os, sys, torch
    class Cycle:
        def __init__(self, *kept):
            self.itself, self.kept = self, kept
    def written():
        file = open(sys.argv[1], "w")
        file.write("written")
        return file
    def suspended(write=os.write, file=os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)):
        try:
            yield
        finally:
            write(file, b"written")
    class Writes:
        def __del__(self, write=os.write, file=os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)):
            write(file, b"written")
    waiting = suspended()
    next(waiting)
    torch.kept_by_torch = Cycle(KEPT)
    waiting = None
    print(gc.get_freeze_count() > 100_000, any(one is torch.nn.Linear for one in gc.get_objects()), flush=True)
"""


@pytest.mark.parametrize("kept", ["written()", "waiting", "Writes()"])
def test_what_a_run_leaves_is_finalised_without_torch_being_collected(place: Path, starter: Starter, kept: str) -> None:
    file = place / "cycle.txt"
    file.unlink(missing_ok=True)
    with forking(starter):
        run(place, ENDS.replace("KEPT", kept), str(file))
    assert "True False" in (place / "output.log").read_text().splitlines()
    assert file.read_text() == "written"


@pytest.mark.usefixtures("_as_in_a_shell")
def test_a_run_does_not_collect_what_a_shared_library_has_made(place: Path) -> None:
    held = Starter(*runner._PROGRAMS)
    with forking(held):
        run(place, "import scipy.stats\nimport gc\nprint(any(one is scipy.stats.norm for one in gc.get_objects()))")
    held.close()
    assert "False" in (place / "output.log").read_text().splitlines()


def test_no_two_runs_draw_the_same(place: Path, starter: Starter) -> None:
    drawn = []
    with forking(starter):
        for _ in range(2):
            run(place, DRAWS, str(place / "drawn.json"))
            drawn.append(json.loads((place / "drawn.json").read_text()))
    assert len(drawn[0]) == 8
    assert [name for name in drawn[0] if drawn[0][name] == drawn[1][name]] == []


DIED = "the process died with {} before it could write a record"
TRAINS_AND_DIES = """
    import os, torch
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    if DIES:
        os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("dies", [False, True])
def test_a_forked_run_reports_and_leaves_no_file(place: Path, starter: Starter, dies: bool) -> None:
    display = Display()
    with forking(starter), shown_on(display):
        run(place, TRAINS_AND_DIES.replace("DIES", str(dies)))
    [(_, _, latest)] = display.seen
    assert latest is not None
    assert latest.step >= 1
    assert not list(place.glob("*.progress"))


@pytest.mark.parametrize(
    ("text", "code", "error"),
    [
        ("import os; os._exit(9)", 9, DIED.format("exit code 9")),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 139, DIED.format("signal SIGSEGV")),
        ("raise KeyError('k')", 1, "KeyError: 'k'"),
    ],
)
def test_endings(place: Path, starter: Starter, text: str, code: int, error: str | None) -> None:
    with forking(starter):
        ended = run(place, text)
    assert (ended.exit_code, ended.error) == (code, error)


def test_a_run_is_stopped_at_its_limit_and_the_next_one_goes_on(place: Path, starter: Starter) -> None:
    with forking(starter):
        run(place, "import os; os._exit(0)")  # the imports would count
        stopped = run(place, "import time; time.sleep(60)", limit_s=0.3)
        after = run(place, "import os; os._exit(4)")
    assert (stopped.exit_code, stopped.error) == (137, "it was stopped at its limit of 0.3 s")
    assert after.exit_code == 4


def test_what_a_run_has_started_is_stopped_with_it_and_the_process_lives(
    place: Path, starter: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
        import os, subprocess, sys, time
        sleeper = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        print(sleeper.pid, os.getpid(), flush=True)
        time.sleep(60)
    """
    wait = runner._wait

    def wait_for_both(process: Any, limit_s: float | None) -> tuple[bool, int]:
        until(lambda: len(numbers()) == 2)
        return wait(process, 0.0)

    def numbers() -> list[int]:
        *lines, _ = (place / "output.log").read_text().split("\n")
        return [int(word) for line in lines for word in line.split() if word.isdigit()]

    with forking(starter):
        with monkeypatch.context() as patched:
            patched.setattr(runner, "_wait", wait_for_both)
            stopped = run(place, text, limit_s=2.0)
        started = numbers()
        after = run(place, "import os; os._exit(4)")
    assert (stopped.exit_code, after.exit_code, len(started)) == (137, 4, 2)
    assert not any(map(_runs, started))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_reach_the_run_and_not_the_process_that_forked_it(
    place: Path, starter: Starter, number: signal.Signals, code: int
) -> None:
    text = """
        import os, sys, time
        os.kill(os.getppid(), int(sys.argv[2]))  # as a terminal does
        os.kill(int(sys.argv[1]), int(sys.argv[2]))
        time.sleep(60)
    """
    with forking(starter), mock.patch.object(sys, "stdin", None):
        ended = run(place, text, str(os.getpid()), str(int(number)))
        after = run(place, "import os; os._exit(4)")
    assert ended.exit_code == code
    assert ended.error == ("KeyboardInterrupt" if number == signal.SIGINT else f"stopped by {number.name}")
    assert after.exit_code == 4


# --- a process of its own after all ------------------------------------------------------------------------------------------

REPLACED = """
import runpy, sys, types
class Pretends(types.ModuleType):
    _is_in_bad_fork = training = lambda self: True
for name in ("torch", "torch._dynamo", "torch.cuda", "mezzo.launch.torch"):
    sys.modules[name] = Pretends(name)
sys.modules["torch"].cuda = sys.modules["torch.cuda"]
runpy.run_module("mezzo.children.fork_server", run_name="__main__", alter_sys=True)
"""


def test_a_fork_that_would_break_cuda_becomes_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def guarded(command: list[str], **more: Any) -> Guarded:
        return Guarded([command[0], "-c", REPLACED, *command[3:]], **more)

    monkeypatch.setattr(ready, "Guarded", guarded)
    text = """
        import os, sys, torch
        print(torch.cuda._is_in_bad_fork(), "torch._dynamo" in sys.modules, sorted(os.listdir("/proc/self/fd"))[:-1])
        sys.exit(3)
    """
    with shared_imports():
        ended = run(tmp_path, text)
    assert ended.exit_code == 3
    assert (tmp_path / "output.log").read_text().splitlines()[-1] == "False False ['0', '1', '2']"
    said = "mezzo: the runs did not share the import of PyTorch: importing PyTorch initialised CUDA, which does not survive a fork\n"
    assert capfd.readouterr().err == said


@pytest.fixture
def broken_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every new process fail at once to import torch."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "torch.py").write_text("print('half of torch')\nraise ImportError('broken')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"), prepend=os.pathsep)


@pytest.mark.usefixtures("broken_torch")
def test_imports_that_fail_are_shown_by_the_run_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with shared_imports():
        ended = run(tmp_path, "")
        first = (tmp_path / "output.log").read_text()
        run(tmp_path, "")
        assert (tmp_path / "output.log").read_text() == first
    assert ended.error == DIED.format("exit code 1")
    assert first.count("half of torch") == 1
    assert "ImportError: broken" in first
    assert "importing PyTorch and its compiler failed: ImportError: broken" in capfd.readouterr().err


@pytest.mark.usefixtures("broken_torch")
def test_the_imports_can_begin_before_the_first_run(tmp_path: Path) -> None:
    request = request_for(tmp_path, "")
    with shared_imports(prints_why_not=False):
        starter = runner._STARTER.get()
        assert starter is not None
        import_ahead(request.model_copy(update={"framework": "keras"}))
        assert starter._process is None
        import_ahead(request)
        begun = starter._process
        assert begun is not None
        run_child(request, output=tmp_path / "output.log")
        assert starter._process is begun


COMMAND = """
import sys, time
from pathlib import Path
from mezzo.children.fork_server import Starter
from mezzo.launch.progress import shown_on
from mezzo.launch.request import Request
starter = Starter("mezzo.launch.child", "mezzo.launch.torch")
with open("output.log", "wb") as sink:
    request = Request.of_json(sys.argv[1])
    starter.start(request.packed(), request.target, kind=request.kind, sink=sink).wait()
print(starter._process._process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.usefixtures("broken_torch")
def test_the_process_ends_with_a_command_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMMAND, request_for(tmp_path, "").model_dump_json()]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        other = int(process.stdout.readline())
        assert Path(f"/proc/{other}").exists()
        process.kill()
    until(lambda: not _runs(other))


def _runs(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.usefixtures("broken_torch")
def test_runs_go_on_when_the_process_is_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with shared_imports():
        run(tmp_path, "")
        starter = runner._STARTER.get()
        assert starter is not None
        assert starter._process is not None
        starter.why_not_forked = None
        starter._process.kill()
        starter._process.wait()  # its guard has ended, too
        ended = run(tmp_path, "")
    assert ended.error == DIED.format("exit code 1")
    assert "ImportError: broken" in (tmp_path / "output.log").read_text()
    assert "the process that had imported PyTorch for all runs was killed" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("script", "beside", "named"),
    [
        ("import os\nos.environ['TORCHINDUCTOR_CACHE_DIR'] = 'x'", "", "script.py names TORCHINDUCTOR_CACHE_DIR"),
        ("import helper", "TRITON_INTERPRET = 1", "helper.py names TRITON_INTERPRET"),
        ("import torch\ntorch.compile", "PYTORCH_CUDA_ALLOC_CONF = TORCHELASTIC_RUN_ID", None),
    ],
)
def test_variables_that_the_compiler_reads_when_it_is_imported(
    tmp_path: Path, script: str, beside: str, named: str | None
) -> None:
    request = request_for(tmp_path, script)
    (tmp_path / "helper.py").write_text(beside)
    why = None if named is None else f"{named}, which the compiler reads when it is imported"
    assert ready._why_not(request.target, request.kind) == why


def test_files_beside_the_script_that_hide_what_the_compiler_imports(tmp_path: Path) -> None:
    (tmp_path / "sympy").mkdir()  # a folder of data hides no package
    assert ready._why_not_here(str(tmp_path), ["statistics", "sympy"]) is None
    (tmp_path / "statistics.py").touch()
    why = f"{tmp_path / 'statistics.py'} has the name of a module that is imported once for all runs"
    assert ready._why_not_here(str(tmp_path), ["statistics", "sympy"]) == why


def test_threads_are_counted() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    before = len(os.listdir("/proc/self/task"))
    thread.start()
    why = ready._several_threads()
    end.set()
    thread.join()
    assert why == f"importing PyTorch started {before} threads, which a fork would lose"


def test_an_open_driver_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "_DEVICES", (f"{tmp_path}/nvidia",))
    assert ready._device_opened() is None
    with (tmp_path / "nvidia0").open("w"):
        why = ready._device_opened()
    assert why == f"importing PyTorch opened {tmp_path}/nvidia0, which does not survive a fork"


def test_another_folder_or_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starter = Starter(*runner._PROGRAMS)
    monkeypatch.setenv("MEZZO_TEST", "1")
    request = request_for(tmp_path, "")
    with (tmp_path / "output.log").open("wb") as sink:
        assert starter.start(request.packed(), request.target, kind=request.kind, sink=sink) is None
    assert starter.why_not_forked == "the folder or the environment changed between the runs"


def test_other_systems_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with shared_imports():
        starter = runner._STARTER.get()
        assert starter is not None
        assert not starter.begin("script.py", kind="script")
        assert starter._process is None


def test_runs_that_no_process_is_started_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Starter, "start", lambda *_, **__: pytest.fail("it was asked to start a run"))
    commands: list[list[str]] = []
    monkeypatch.setattr(runner, "Guarded", lambda command, **_: commands.append(command))
    request = request_for(tmp_path, "")
    with shared_imports(), (tmp_path / "output.log").open("wb") as sink:
        runner._start(request, None)  # its output goes nowhere else
        runner._start(request.model_copy(update={"output_to_stderr": True}), sink)
        runner._start(request.model_copy(update={"framework": "keras"}), sink)
    assert [command[1:3] for command in commands] == [["-m", "mezzo.launch.child"]] * 3


def test_a_comparison_of_one_run_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "shared_imports", lambda: pytest.fail("there is one run"))
    monkeypatch.setattr(runner, "observe_child", mock.Mock(side_effect=ScriptError("it was run", hint="")))
    target = request_for(tmp_path, "import torch").target
    monkeypatch.setattr("mezzo.commands.compare.command.left_to_run", lambda requests: ([], requests[:1]))
    assert cli.main(["compare", "--policies", "fp32,bf16", "--seeds", "1", "--out", str(tmp_path), target]) == 7
