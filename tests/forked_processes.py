"""Processes of a job, forked from one process that has imported PyTorch and its compiler.

A new process needs some three seconds of a core for imports, and ``mezzo run`` in two processes four times as much; a fork needs none.
A command is a fork, and so is each run that it starts. Signals, guards and processes that die need real processes:
``processes.in_processes`` starts those.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from processes import Ended, rank_variables

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.nn.parallel",
        "matplotlib.backends.backend_svg",
        "matplotlib.figure",
        "mezzo.cli",
        "mezzo.launch.child",
        "mezzo.launch.torch",
        "mezzo.report.html",
    ]
)


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
    """Do what ``processes.in_processes`` does, without its imports; ``program`` is a script, Mezzo or one of its runs."""
    shared = {"OMP_NUM_THREADS": "1", **(rank_variables(size) if launched else {})}
    with tempfile.TemporaryDirectory() as logs:
        outputs = [Path(logs, f"rank{rank}") for rank in range(size)]
        started = []
        for rank, output in enumerate(outputs):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if launched else {}
            env = {**os.environ, **shared, **own}
            started.append(_start(_Task(program, words, env, str(folder or Path.cwd()), str(output))))
        try:
            for process in started:
                process.join(timeout_s)
                assert process.exitcode is not None, [output.read_text() for output in outputs]
        finally:
            for process in started:
                process.kill()
        return [Ended(p.exitcode, output.read_text()) for p, output in zip(started, outputs, strict=True)]


def _start(task: _Task) -> Any:
    process = _CONTEXT.Process(target=_be, args=(task,))
    process.start()
    return process


def _be(task: _Task) -> None:
    """Become the process of ``task``, and end with its exit code, without the interpreter's own end: gloo has threads."""
    import numpy as np
    import torch

    descriptor = os.open(task.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(task.env)
    os.chdir(task.folder)
    torch.set_num_threads(1)
    for seed in (random.seed, np.random.seed, torch.seed):  # all forks would draw the same numbers
        seed()
    code = 1
    try:
        code = _run(task)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(task: _Task) -> int:
    program, words = list(task.program), list(task.words)
    if program == ["-m", "mezzo.launch.child"]:
        from mezzo.launch.child import main

        sys.path[0] = ""
        return main(words)
    if program == ["-m", "mezzo"]:
        from mezzo import cli
        from mezzo.launch import runner

        with mock.patch.object(runner, "Guarded", _Child), mock.patch.object(_Child, "output", task.output):
            return cli.main(words)
    sys.argv[:] = [*program, *words]
    sys.path[0] = str(Path(program[0]).parent)
    runpy.run_path(program[0], run_name="__main__")
    return 0


class _Child:
    """A run that a command starts: a fork, with what ``Guarded`` has."""

    output = ""
    """The file that the command prints to."""

    def __init__(self, command: Sequence[str], *, stdout: Any, stderr: Any) -> None:
        output = getattr(stdout, "name", self.output)
        self._process = _start(_Task(command[1:3], command[3:], dict(os.environ), os.getcwd(), output))

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a run", timeout or 0.0)
        return int(self._process.exitcode)

    def pass_on(self, number: int, *, kill_after_s: float = 0.0) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
