"""What the launcher's tests share: run a script of ``tests/scripts`` in this process, by itself, under a policy or under a command."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import runpy
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from mezzo.launch import child, runner
from mezzo.launch.progress import read_latest
from mezzo.launch.request import Request
from mezzo.launch.torch import switched
from mezzo.measure.environment import environment
from mezzo.measure.live import Latest
from mezzo.observe.settings import AnySettings, StopScript
from mezzo.policy import Policy
from mezzo.records import AnyRecord, Effective, Finding, Memory, RunRecord, Steps
from mezzo.studies.side_by_side import OneAfterAnother
from paths import SCRIPTS

PLAIN = "plain python"
AS_IS = "as-is"


@dataclass(frozen=True)
class Ran:
    """A script's output, and what was recorded of it (nothing under plain python)."""

    values: dict[str, Any]
    """What the script printed by ``report(name=value)``: one JSON object a line, later names replace earlier ones."""
    printed: str
    steps: Steps
    effective: Effective
    memory: Memory
    findings: list[Finding]
    """Misuse of the script's own mixed precision."""

    @property
    def losses(self) -> list[float]:
        """Return the losses that the script itself read off."""
        return list(self.values["losses"])

    @property
    def reasons(self) -> list[str]:
        """Return what was left alone, as one line each."""
        return [f"{r.what} {r.value}: {r.reason}" for r in self.effective.left_alone]


class Display:
    """A display that keeps what it was told, and the last report of the run's file."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool, Latest | None]] = []

    @contextlib.contextmanager
    def following(self, request: Request, *, passes_output: bool) -> Iterator[None]:
        assert request.reports_progress
        try:
            yield
        finally:
            self.seen.append((str(request.policy), passes_output, read_latest(request.progress_file)))


def ran(name: str, policy: str, *arguments: str, seed: int | None = None) -> Ran:
    """Run ``tests/scripts/<name>.py`` under ``policy`` (or ``PLAIN``, or ``AS_IS``) with its arguments."""
    path = str(SCRIPTS / f"{name}.py")
    output = io.StringIO()
    steps, effective, memory, findings = Steps(), Effective(), Memory(), list[Finding]()
    with as_script(path, arguments), contextlib.redirect_stdout(output):
        if policy == PLAIN:
            runpy.run_path(path, run_name="__main__")
        else:
            chosen = None if policy == AS_IS else Policy.parse(policy)
            with switched(chosen, seed=seed) as (run, counted):
                runpy.run_path(path, run_name="__main__")
            steps, effective, memory = run.update.recorder.steps(), counted.effective(), counted.memory()
            findings = run.lint.findings()
    return Ran(read_values(output.getvalue()), output.getvalue(), steps, effective, memory, findings)


def observed_record(script: Callable[[], object], policy: str | None, observe: AnySettings) -> AnyRecord:
    """Return the record of what an observer saw of ``script``."""
    chosen = None if policy is None else Policy.parse(policy)
    with switched(chosen, observe=observe) as (run, _), contextlib.suppress(StopScript):
        script()
    assert run.listeners.observer is not None
    return run.listeners.observer.record(run_record(policy or AS_IS))


def run_record(policy: str) -> RunRecord:
    """Return the record of a run of which nothing else is known."""
    return RunRecord(command=[], script="x.py", script_sha256="", policy=policy, environment=environment("cpu"))


def request_for(folder: Path, target: str, *arguments: str, policy: str | None = "fp32", **asked: Any) -> Request:
    """Return the request for a run of a script whose record lies in ``folder``."""
    record = str(folder / "record.json")
    known: dict[str, Any] = {"kind": "script", "arguments": arguments, "command": ("mezzo",)}
    return Request(target=target, policy=policy, record_path=record, **{**known, **asked})


def run_in_child(folder: Path, target: str, *arguments: str, **asked: Any) -> RunRecord:
    """Run a script as the child process of a command does; what it prints is in ``output.log``."""
    with children_in_this_process():
        return runner.run_child(request_for(folder, target, *arguments, **asked), output=folder / "output.log")


def read_values(printed: str) -> dict[str, Any]:
    """Return what ``report`` printed."""
    values: dict[str, Any] = {}
    for line in printed.splitlines():
        if line.startswith("{"):
            values.update(json.loads(line))
    return values


@contextlib.contextmanager
def as_script(path: str, arguments: Sequence[str]) -> Iterator[None]:
    folder = str(Path(path).parent)
    with mock.patch.object(sys, "argv", [path, *arguments]), mock.patch.object(sys, "path", [folder, *sys.path]):
        yield


@contextlib.contextmanager
def children_in_this_process(*, before_each: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Run the commands' child processes in this one: importing torch and its compiler takes longer than what they do."""
    with (
        mock.patch.object(runner, "Guarded", functools.partial(_InThisProcess, before_each)),
        mock.patch.object(runner, "shared_imports", return_value=contextlib.nullcontext()),
    ):
        yield


class ThreeAtOnce(OneAfterAnother):
    """An engine with room for three runs, which it makes one after another: what is made beside what, without the threads."""

    at_once: int | None = 3


class Children:
    """The runs that a command started, and the number of the run in which Ctrl-C is typed."""

    def __init__(self, *, interrupt_at: int = 0) -> None:
        self.num, self._interrupt_at = 0, interrupt_at

    def __call__(self) -> None:
        self.num += 1
        if self.num == self._interrupt_at:
            os.kill(os.getpid(), signal.SIGINT)


class _InThisProcess:
    """Stand in for a child process of the runner."""

    def __init__(self, before: Callable[[], object], command: Sequence[str], **streams: Any) -> None:
        assert command[1:3] == ["-m", "mezzo.launch.child"]
        self._before, self._argument, self._file = before, command[3], streams["stdout"]

    def wait(self, limit_s: float | None = None) -> int:
        printed = io.StringIO()
        self._before()
        with _as_child(), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            returned = child.main([self._argument])
        if hasattr(self._file, "write"):
            self._file.write(printed.getvalue().encode())
        else:
            sys.stderr.write(printed.getvalue())
        return returned

    def pass_on(self, number: int, *, kill_after_s: float = 0.0) -> None:
        """Do nothing: this process, which is also the run, has received the signal."""

    def kill(self) -> None:
        raise KeyboardInterrupt  # a person who waits for the tests


@contextlib.contextmanager
def _as_child() -> Iterator[None]:
    """Restore what a child process changes in itself; a trainer's progress bar leaves a daemon thread."""
    handler = signal.getsignal(signal.SIGINT)
    with mock.patch.multiple(sys, argv=[], path=["", *sys.path]), mock.patch.object(child, "_exit_without_shutdown"):
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, handler)
            child._NAMESPACES.clear()
