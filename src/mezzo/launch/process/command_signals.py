"""Handle the signals that stop a command while it runs scripts: pass them on to the run, start no further run, keep the records.

After SIGINT the script may take as long as it needs, as under Python; a second SIGINT asks it to end, a third kills it. After SIGTERM
and SIGHUP it has ``GRACE_S``. A signal that was ignored when this process started, as under ``nohup``, stays ignored.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import TYPE_CHECKING

from mezzo.launch.process.guard import PASSED_ON, STOPPING

if TYPE_CHECKING:
    from mezzo.launch.process.group import Process
    from mezzo.records import RunRecord

GRACE_S = 10.0
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
        """Pass signals on to a run, including one that arrived just before it began."""
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
    return 0.0 if number == signal.SIGINT else GRACE_S


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
