"""Commands and their runs as forks of one process that has imported PyTorch and its compiler.

A new process needs some three seconds of a core for imports, and ``mezzo run`` in two processes four times as much; a fork needs none.
Tests of signals, guards and processes that die need new processes: ``processes.in_processes`` starts them.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

from processes import Ended, environments

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.nn.parallel",
        "matplotlib.ticker",
        "mezzo.cli",
        "mezzo.launch.child",
        "mezzo.launch.torch",
        "mezzo.report.html",
    ]
)
_VARIABLES: ContextVar[Mapping[str, str]] = ContextVar("variables", default=MappingProxyType({}))
"""The environment variables that a command gives its runs beside its own."""


class _Task(NamedTuple):
    """What a process runs, as after ``python``, and where; ``output`` is the file that it prints to."""

    program: Sequence[str]
    words: Sequence[str]
    env: Mapping[str, str]
    folder: str
    output: str


def in_forks(
    words: Sequence[str],
    *,
    program: Sequence[str] = ("-m", "mezzo"),
    size: int = 2,
    launched: bool = True,
    folder: Path | None = None,
    timeout_s: float = 200.0,
) -> list[Ended]:
    """Do what ``processes.in_processes`` does, without the imports; ``program`` is a script, a module or Mezzo."""
    with tempfile.TemporaryDirectory() as logs, _Forks() as forks:
        outputs = [Path(logs, f"rank{rank}") for rank in range(size)]
        for env, output in zip(environments(size, launched=launched), outputs, strict=True):
            forks.start(_Task(program, words, env, str(folder or Path.cwd()), str(output)))
        codes = forks.wait(timeout_s)
        assert codes is not None, [output.read_text() for output in outputs]
        return [Ended(code, output.read_text()) for code, output in zip(codes, outputs, strict=True)]


def in_fork(words: Sequence[str], *, folder: Path) -> Ended:
    """Run Mezzo with ``words`` in one process, without a launcher."""
    (ended,) = in_forks(words, size=1, launched=False, folder=folder)
    return ended


@contextmanager
def forked_runs() -> Iterator[None]:
    """Fork the runs of commands that the test itself calls."""
    with _runs_as(_Run):
        yield


@contextmanager
def _runs_as(starts: Callable[..., Any]) -> Iterator[None]:
    """Start runs by ``starts``, without a server of the command's own."""
    from mezzo.launch import runner

    with mock.patch.multiple(runner, Guarded=starts, shared_imports=_without_server):
        yield


@contextmanager
def _without_server(*, prints_why_not: bool = True, variables: Mapping[str, str] | None = None) -> Iterator[None]:
    """Stand in for ``shared_imports``."""
    before = _VARIABLES.set(variables or {})
    try:
        yield
    finally:
        _VARIABLES.reset(before)


class _Forks:
    """Forked commands and the runs that they ask for: in a fork, ``multiprocessing`` would start another server, with all imports."""

    def __init__(self) -> None:
        self._commands: list[tuple[Any, Connection]] = []
        self._runs: dict[Any, tuple[Any, Connection]] = {}
        """By what tells that it has ended: a run, and the command to tell."""

    def __enter__(self) -> _Forks:
        return self

    def __exit__(self, *_: object) -> None:
        for process, _ in (*self._commands, *self._runs.values()):
            process.kill()

    def start(self, task: _Task) -> None:
        """Start a command."""
        ours, theirs = _CONTEXT.Pipe()
        self._commands.append((self._fork(task, theirs), ours))
        theirs.close()

    def wait(self, timeout_s: float) -> list[int] | None:
        """Return the commands' exit codes, and start the runs that they ask for meanwhile; None if they take too long."""
        end_s = time.monotonic() + timeout_s
        asking = [ours for _, ours in self._commands]
        while running := [process.sentinel for process, _ in self._commands if process.exitcode is None]:
            ready = connection.wait([*running, *asking, *self._runs], max(end_s - time.monotonic(), 0.0))
            if not ready:
                return None
            for one in ready:
                if one in self._runs:
                    self._tell_end(*self._runs.pop(one))
                elif one in asking and not self._answer(one):
                    asking.remove(one)
        return [process.exitcode for process, _ in self._commands]

    def _answer(self, command: Connection) -> bool:
        """Start the run that a command asks for; return False if it has ended."""
        try:
            task = command.recv()
        except EOFError:
            return False
        process = self._fork(task, None)
        self._runs[process.sentinel] = process, command
        command.send(process.pid)
        return True

    def _tell_end(self, process: Any, command: Connection) -> None:
        process.join()
        with suppress(BrokenPipeError):  # the command did not wait for it
            command.send((process.pid, process.exitcode))

    def _fork(self, task: _Task, asks: Connection | None) -> Any:
        process = _CONTEXT.Process(target=_be, args=(task, asks))
        process.start()
        return process


def _be(task: _Task, asks: Connection | None) -> None:
    """Become the process of ``task``, and end with its exit code; skip the interpreter's shutdown, which gloo's threads may abort."""
    import numpy as np
    import torch

    os.chdir(task.folder)
    descriptor = os.open(task.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(task.env)
    torch.set_num_threads(int(task.env["OMP_NUM_THREADS"]))
    for seed in (random.seed, np.random.seed, torch.seed):  # all forks would draw the same numbers
        seed()
    code = 1
    try:
        code = _run(task, asks)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(task: _Task, asks: Connection | None) -> int:
    program, words = list(task.program), list(task.words)
    if program == ["-m", "mezzo.launch.child"]:
        from mezzo.launch.child import main

        sys.path[0] = ""
        return main(words)
    if program == ["-m", "mezzo"]:
        from mezzo import cli

        with _runs_as(functools.partial(_AskedRun, asks, task.output)):
            return cli.main(words)
    if program[0] == "-m":
        sys.argv[:], sys.path[0] = [program[1], *words], os.getcwd()
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        return
    sys.argv[:] = [*program, *words]
    sys.path[0] = str(Path(program[0]).parent)
    runpy.run_path(program[0], run_name="__main__")
    return 0


class _AskedRun:
    """A run that a forked command asks for: a fork, with the interface of ``Guarded``."""

    def __init__(
        self, asks: Connection, output: str, command: Sequence[str], *, stdout: Any, stderr: Any, env: Any = None
    ) -> None:
        self._asked = asks
        asks.send(_task_of(command, getattr(stdout, "name", output)))
        self.pid: int = asks.recv()
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            if not self._asked.poll(timeout):
                raise subprocess.TimeoutExpired("a run", timeout or 0.0)
            pid, self._code = self._asked.recv()
            assert pid == self.pid
        assert self._code is not None
        return self._code

    def pass_on(self, number: int, *, kill_after_s: float = 0.0) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class _Run:
    """A run that the test's own process starts: a fork, with the interface of ``Guarded``."""

    def __init__(self, command: Sequence[str], *, stdout: Any, stderr: Any, env: Any = None) -> None:
        output = getattr(stdout, "name", f"/proc/{os.getpid()}/fd/{stdout or 1}")
        self._process = _CONTEXT.Process(target=_be, args=(_task_of(command, output), None))
        self._process.start()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a run", timeout or 0.0)
        return self._process.exitcode

    def pass_on(self, number: int, *, kill_after_s: float = 0.0) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _task_of(command: Sequence[str], output: str) -> _Task:
    """Return the task of a command's line that starts a run."""
    return _Task(command[1:3], command[3:], {**os.environ, **_VARIABLES.get()}, os.getcwd(), output)
