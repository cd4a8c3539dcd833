"""Compare the times of loops, each in its own process, like a script: its hooks are set once and never removed.

In one process that sets and removes the hooks between blocks, Python's specialization of the changed types is lost each time, and the
loop with more Python pays most for that: 2% of a small step, which no script pays. The processes of a build are forked from one, so they
have the same imports. They run their blocks alternately. The placement of memory favours one loop or another by a percent or two, so
there are several builds, and the interval is between their medians.

A process that has called CUDA's driver, or run a backward pass of a build for CUDA, has no forks that can use the GPU. So if the
loops train on a GPU, the process that forks runs none of them: it only imports, and queries the GPU in a temporary process.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from benchmarks.shared.harness import over_builds

SLOWEST_S = 120.0
"""Seconds without an answer after which a process has failed."""
Loop = Callable[[], AbstractContextManager[Callable[[], Any]]]
"""Returns the context in which its block runs; has to be picklable where processes are not forked."""


class Spent(NamedTuple):
    """The times of one block in milliseconds."""

    thread_ms: float
    """CPU time of the thread that trains. On a GPU it excludes the backward pass, which runs in autograd's own thread."""
    process_ms: float
    """CPU time of all threads of the process."""
    wall_ms: float


@dataclass(frozen=True)
class Build:
    """The times of each loop's blocks, and the errors of loops without any."""

    times: dict[str, list[Spent]]
    failed: dict[str, str] = field(default_factory=dict)


class NoAnswerError(Exception):
    """A process did not answer."""


class Served:
    """A process, and the connection over which it answers."""

    def __init__(self, start: str, serve: Callable[..., None], *arguments: Any) -> None:
        context: Any = multiprocessing.get_context(start)
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=_answering, args=(theirs, serve, *arguments), daemon=True)
        self._process.start()
        theirs.close()  # so that the connection ends with the process

    def answer(self, limit_s: float = SLOWEST_S) -> Any:
        """Return the next answer.

        Raises:
            NoAnswerError: the process failed, ended, or takes too long.
        """
        if not self._line.poll(limit_s):
            raise NoAnswerError(f"no answer within {limit_s:.0f} s")
        try:
            kind, value = self._line.recv()
        except EOFError:
            self._process.join(10)
            raise NoAnswerError(f"the process ended with exit code {self._process.exitcode}") from None
        if kind == "failed":
            raise NoAnswerError(value)
        return value

    def ask(self, again: bool) -> Any:
        """Request another block, or the end, and return the answer."""
        try:
            self._line.send(again)
        except OSError:
            raise NoAnswerError("the process has ended") from None
        return self.answer()

    def close(self) -> None:
        self._line.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10)


def answer_of(call: Callable[[], Any], *, start: str = "fork", limit_s: float = SLOWEST_S) -> Any:
    """Return the result of ``call``, run in a separate process.

    Raises:
        NoAnswerError: it failed there.
    """
    process = Served(start, answered, call)
    try:
        return process.answer(limit_s)
    finally:
        process.close()


def build(loops: Mapping[str, Loop], *, blocks: int, start: str = "fork") -> Build:
    """Set up every loop in a separate process and run their blocks alternately; a loop that fails is left out from then on."""
    processes = {name: Served(start, _serve, loop) for name, loop in loops.items()}
    found = Build({name: [] for name in loops})

    def of_all(ask: Callable[[Served], Any]) -> dict[str, Any]:
        answers = {}
        for name in [name for name in loops if name not in found.failed]:
            try:
                answers[name] = ask(processes[name])
            except NoAnswerError as error:
                found.failed[name] = str(error)
                del found.times[name]
        return answers

    try:
        of_all(Served.answer)  # set up
        for _ in range(blocks):
            for name, spent in of_all(lambda process: process.ask(True)).items():
                found.times[name].append(spent)
        of_all(lambda process: process.ask(False))
    finally:
        for process in processes.values():
            process.close()
    return found


def ratio(builds: list[Build], of: str, to: str, clock: str = "thread_ms") -> dict[str, Any]:
    """Return the median over builds of the median ratio of two loops by one clock, and the interval of the builds' medians."""
    return over_builds(
        [getattr(a, clock) / getattr(b, clock) for a, b in zip(one.times[of], one.times[to], strict=True)]
        for one in builds
    )


def _answering(line: Connection, serve: Callable[..., None], *arguments: Any) -> None:
    try:
        serve(line, *arguments)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename.rpartition('/')[2]}:{last.lineno}"
        line.send(("failed", f"{type(error).__name__} at {where}: {str(error)[:600]}"))


def answered(line: Connection, call: Callable[[], Any]) -> None:
    line.send(("answer", call()))


def _serve(line: Connection, loop: Loop) -> None:
    """Run a block for each request on ``line``; answer with its times."""
    torch.set_num_threads(1)
    with loop() as block:
        line.send(("answer", None))
        while line.recv():
            began = time.thread_time(), time.process_time(), time.perf_counter()
            block()
            ended = time.thread_time(), time.process_time(), time.perf_counter()
            line.send(("answer", Spent(*((b - a) * 1e3 for a, b in zip(began, ended, strict=True)))))
    line.send(("answer", None))
