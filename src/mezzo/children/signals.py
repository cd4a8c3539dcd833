"""Signals that stop a command while it runs scripts: they reach the run and its script, no further run starts, the records stay.

After SIGINT the script may take as long as it needs, as under Python; a second SIGINT asks it to end, a third kills it. After SIGTERM
and SIGHUP it has ``SIGNAL_GRACE_S``. A signal that was ignored when this process started, as under ``nohup``, stays ignored.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Protocol

from mezzo.children.guard import FINAL_SIGNAL, PASSED_ON, STOPPING

if TYPE_CHECKING:
    from mezzo.records import RunRecord


SIGNAL_GRACE_S = 10.0
"""Time for a run to end after SIGTERM or SIGHUP: as long as ``docker stop`` waits."""

_SECOND_GRACE_S = 3.0
"""Time for a run to end after a second Ctrl-C."""

_SAME_SIGNAL_S = 0.3
"""Two signals within this time count as one: ``timeout`` sends its signal to the command, and then to the command's group."""

_STOP: ContextVar[Stop | None] = ContextVar("stop", default=None)


class Stopped(Exception):
    """Ends a command after a signal, so that no further run begins."""

    def __init__(self, number: int, record: RunRecord | None = None) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number
        self.record = record
        """The record of the stopped run; None if none was stopped."""


class Stop:
    """The signal that has stopped the command, and the runs that signals are passed on to."""

    def __init__(self) -> None:
        self._processes: list[Process] = []  # started by several threads if runs are side by side
        self._signal: int | None = None
        self._times = 0
        self._last = 0.0
        self._at_once = False

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped the command."""
        return self._signal is not None

    @property
    def exit_code(self) -> int:
        """The command's exit code for the signal that stopped it, 0 if none did."""
        return 0 if self._signal is None else 128 + self._signal

    @property
    def name(self) -> str:
        """The name of the signal that stopped the command, or an empty text."""
        return "" if self._signal is None else signal.Signals(self._signal).name

    def check(self, record: RunRecord | None = None) -> None:
        """Raise if a signal has stopped the command.

        Raises:
            Stopped: a signal has stopped the command; it carries ``record``.
        """
        if self._signal is not None:
            raise Stopped(self._signal, record)

    @contextmanager
    def passing_to(self, process: Process) -> Iterator[None]:
        """Pass signals on to a run, even if they arrived just before it began."""
        self._processes.append(process)
        try:
            if self._signal is not None:
                process.pass_on(self._signal, kill_after_s=_grace_s(self._signal))
            yield
        finally:
            self._processes.remove(process)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Raise ``Stopped`` when a signal arrives inside, which must be work of the main thread that an exception ends.

        Raises:
            Stopped: a signal has stopped the command, now or before.
        """
        self.check()
        before, self._at_once = self._at_once, threading.current_thread() is threading.main_thread()
        try:
            yield
        finally:
            self._at_once = before

    def handle(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal.

        Raises:
            Stopped: it arrived inside ``at_once``.
        """
        processes = [*self._processes]
        if number not in STOPPING:
            for process in processes:
                process.pass_on(number)
            return
        now = time.monotonic()
        repeated = now - self._last >= _SAME_SIGNAL_S
        if self._signal is None or number != self._signal:
            self._signal = self._signal or number
            self._times, self._last = 1, now
            for process in processes:
                process.pass_on(number, kill_after_s=_grace_s(number))
            if self._at_once:
                self._at_once = False  # what the exception ends must not be ended a second time
                raise Stopped(number)
        elif number == signal.SIGINT and repeated:
            self._times, self._last = self._times + 1, now
            self._repeat_interrupt(processes)

    def _repeat_interrupt(self, processes: Sequence[Process]) -> None:
        if not processes:  # the command itself is busy with a record or a report
            raise KeyboardInterrupt
        for process in processes:
            if self._times == 2:
                process.pass_on(signal.SIGTERM, kill_after_s=_SECOND_GRACE_S)
            else:
                process.kill()


def _grace_s(number: int) -> float:
    """Return the time for a run to end after a signal; 0 for no limit."""
    return 0.0 if number == signal.SIGINT else SIGNAL_GRACE_S


@contextmanager
def stoppable() -> Iterator[Stop]:
    """Handle signals inside; a nested context yields the outer one."""
    outer = _STOP.get()
    if outer is not None:
        yield outer
        return
    stop = Stop()
    token = _STOP.set(stop)
    in_main = threading.current_thread() is threading.main_thread()  # Python delivers signals only to the main thread
    handled = [n for n in PASSED_ON if in_main and signal.getsignal(n) not in (signal.SIG_IGN, None)]
    previous = {number: signal.signal(number, stop.handle) for number in handled}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        _STOP.reset(token)


_FATAL = tuple(number for number in (*STOPPING, FINAL_SIGNAL) if number not in (signal.SIGINT, None))
"""The signals that would end Python without an exception."""


class EndedBySignal(SystemExit):
    """Ends a script after a signal; passes through ``except Exception`` and through frameworks that handle SystemExit."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + (signal.SIGTERM if number == FINAL_SIGNAL else number)
        super().__init__(self.exit_code)
        name = (
            "force: it had not reacted to the first signal" if number == FINAL_SIGNAL else signal.Signals(number).name
        )
        self.sentence = f"stopped by {name}"


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turn signals into ``EndedBySignal``; a script's own handlers, and processes that it forks, behave as under Python."""
    ours = [number for number in _FATAL if signal.getsignal(number) is signal.SIG_DFL]

    def end(number: int, frame: FrameType | None) -> None:
        raise EndedBySignal(number)

    def restore() -> None:
        for number in ours:
            if signal.getsignal(number) is end:
                signal.signal(number, signal.SIG_DFL)

    for number in ours:
        signal.signal(number, end)
    _restore_in_forks(restore, ours)
    try:
        yield
    finally:
        restore()


def _restore_in_forks(restore: Callable[[], None], numbers: list[int]) -> None:
    """Call ``restore`` in every forked process; signals sent to it before then are delivered afterwards."""
    if not hasattr(os, "register_at_fork"):
        return
    masks = threading.local()

    def before() -> None:
        masks.original = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.original)

    def after_in_child() -> None:
        restore()
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=after_in_child)


@contextmanager
def interrupts_kill() -> Iterator[None]:
    """Let Ctrl-C end the process silently until the script's code begins to run."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore signals while the record is written, and Ctrl-C from then on: only Python's own shutdown is left."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, *_FATAL)}
    try:
        yield
    finally:
        for number in _FATAL:
            signal.signal(number, before[number])


_GUARD = str(Path(__file__).with_name("guard.py"))
_GUARDS = hasattr(os, "fork")


class Process(Protocol):
    """A run's process, as seen by the command."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, negative for the signal that ended it.

        Raises:
            subprocess.TimeoutExpired: it still runs after ``timeout`` seconds.
        """

    def pass_on(self, number: int, *, kill_after_s: float = 0.0) -> None:
        """Send it a signal, unless a terminal has sent it already; kill it with its descendants ``kill_after_s`` later (0: never)."""

    def kill(self) -> None:
        """Kill it with its descendants."""


class Guarded:
    """A process that a guard kills, with its descendants, when this process ends (``guard.py``)."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdout: int | IO[bytes] | None,
        stderr: int | None,
        pass_fds: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._pipe: int | None = None
        if not _GUARDS:
            self._process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=env)
            return
        read_end, self._pipe = os.pipe()
        guarded = [sys.executable, "-S", _GUARD, str(read_end), *command]
        try:
            self._process = subprocess.Popen(
                guarded, stdout=stdout, stderr=stderr, pass_fds=[read_end, *pass_fds], env=env
            )
        finally:
            os.close(read_end)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, negative for the signal that ended it."""
        returned = self._process.wait(timeout)
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
        return returned

    def pass_on(self, number: int, *, kill_after_s: float = 0.0, pid: int = 0) -> None:
        """Send a signal to the process (0), or to its descendant ``pid``, unless a terminal has sent it already."""
        if not self._send(f"pass {number} {pid} {kill_after_s:g}"):
            self._process.send_signal(number)

    def kill(self, pid: int = 0) -> None:
        """Kill the process (0), or its descendant ``pid``, with all descendants."""
        if not self._send(f"kill {pid}"):
            self._process.send_signal(getattr(signal, "SIGKILL", signal.SIGTERM))

    def cancel_kill(self) -> None:
        """Cancel a pending kill: the process that was signalled has ended."""
        self._send("ended")

    def _send(self, text: str) -> bool:
        """Write a line to the guard; return whether this system has guards."""
        if self._pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # the guard has ended, and the run with it
                os.write(self._pipe, f"{text}\n".encode())
        return _GUARDS
