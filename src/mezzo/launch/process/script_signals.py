"""Turn signals into exceptions in the script, so that its record is still written."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from mezzo.launch.process.guard import LAST_WORD, STOPPING

_AT_ONCE = tuple(number for number in (*STOPPING, LAST_WORD) if number not in (signal.SIGINT, None))
"""The signals that would end Python without an exception."""


class EndedBySignal(SystemExit):
    """The end of a script by a signal; passes through ``except Exception`` and through frameworks that handle SystemExit."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + (signal.SIGTERM if number == LAST_WORD else number)
        super().__init__(self.exit_code)
        name = "force: it had not reacted to the first signal" if number == LAST_WORD else signal.Signals(number).name
        self.sentence = f"stopped by {name}"


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turn signals into ``EndedBySignal``; a script's own handlers, and processes that it forks, behave as under Python."""
    ours = [number for number in _AT_ONCE if signal.getsignal(number) is signal.SIG_DFL]

    def end(number: int, frame: FrameType | None) -> None:
        raise EndedBySignal(number)

    def forget() -> None:
        for number in ours:
            if signal.getsignal(number) is end:
                signal.signal(number, signal.SIG_DFL)

    for number in ours:
        signal.signal(number, end)
    _in_forks(forget, ours)
    try:
        yield
    finally:
        forget()


def _in_forks(forget: Callable[[], None], numbers: list[int]) -> None:
    """Call ``forget`` in every forked process; signals sent to it before then are delivered afterwards."""
    if not hasattr(os, "register_at_fork"):
        return
    masks = threading.local()

    def before() -> None:
        masks.own = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.own)

    def after_in_child() -> None:
        forget()
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
def undisturbed() -> Iterator[None]:
    """Ignore signals while the record is written, and Ctrl-C from then on: only Python's own shutdown is left."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, *_AT_ONCE)}
    try:
        yield
    finally:
        for number in _AT_ONCE:
            signal.signal(number, before[number])
