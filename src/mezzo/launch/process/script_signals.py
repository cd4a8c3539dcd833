"""Turn signals into exceptions in the script, so that its record is still written."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from mezzo.launch.process.guard import FINAL_SIGNAL, STOPPING

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
