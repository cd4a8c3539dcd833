"""Sample the training thread from outside, ten times a second: its CPU time, the time it waited for a core, and its line.

Linux counts for each thread how long it ran and how long it was ready to run while others had the cores
(``/proc/self/task/*/schedstat``). The rest of the time it slept: on a lock, in ``time.sleep``, on a disk or a socket. So a machine
that other processes keep busy is not mistaken for a script that waits. On other systems only the CPU time of the whole process
is known, to which other threads may contribute: the sleeping time is then a lower bound.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

_LIBRARIES = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_FOLDERS = (str(Path(__file__).parents[2]), *_LIBRARIES, *(str(Path(path).resolve()) for path in _LIBRARIES))
_NOT_THE_SCRIPTS = ("<", *(folder + os.sep for folder in _FOLDERS))
_PACKAGES = "-packages"
"""In the paths of installed packages: ``site-packages``, ``dist-packages``."""
_ASLEEP = 0.5
"""The share of the time since the last sample below which a thread counts as asleep at its line."""
_FEWEST = 3
"""The fewest samples for shares."""


class HostSample(NamedTuple):
    """One sample of the training thread."""

    at_s: float
    """By ``time.perf_counter``."""
    ran_s: float
    """CPU time of the thread."""
    preempted_s: float
    """Time in which the thread was ready to run and other threads had the cores."""


class HostShares(NamedTuple):
    """Shares of a time."""

    slept: float
    preempted: float


class HostSamples:
    """Samples of the thread that created it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._file = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        self.samples: list[HostSample] = []
        self.sleeping: Counter[str] = Counter()
        """How often the thread was seen at each line of the script while it had slept since the sample before."""

    def take(self) -> None:
        """Take one sample; the cost is one small file read and a walk up the thread's stack."""
        sample = HostSample(time.perf_counter(), *self._times_s())
        if self.samples:
            before = self.samples[-1]
            ready_s = sample.ran_s - before.ran_s + sample.preempted_s - before.preempted_s
            busy = ready_s / max(sample.at_s - before.at_s, 1e-9)
            line = line_of(sys._current_frames().get(self._thread)) if busy < _ASLEEP else ""
            if line:
                self.sleeping[line] += 1
        self.samples.append(sample)

    def shares(self, begin_s: float, end_s: float) -> HostShares | None:
        """Return what the thread did between two times; None if too little was sampled."""
        inside = [sample for sample in self.samples if begin_s <= sample.at_s <= end_s]
        if len(inside) < _FEWEST:
            return None
        first, last = inside[0], inside[-1]
        wall_s = last.at_s - first.at_s
        ran, preempted = (last.ran_s - first.ran_s) / wall_s, (last.preempted_s - first.preempted_s) / wall_s
        return HostShares(slept=min(max(1.0 - ran - preempted, 0.0), 1.0), preempted=min(max(preempted, 0.0), 1.0))

    def _times_s(self) -> tuple[float, float]:
        try:
            with open(self._file, encoding="ascii") as file:
                ran_ns, preempted_ns, _ = file.read().split()
            return int(ran_ns) * 1e-9, int(preempted_ns) * 1e-9
        except (OSError, ValueError):
            return time.process_time(), 0.0


def line_of(frame: FrameType | None) -> str:
    """Return the innermost line of the script's own code as ``train.py:15``; empty if there is none."""
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_NOT_THE_SCRIPTS) and _PACKAGES not in path:
            return f"{Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


# --- Time the calls in which the training thread only waits, for the data loader or for other processes -------------------------


class Waits:
    """A list of waits of one kind in one thread. A wait inside a wait counts once."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._inside = False
        self._ended_s, self._lasted_s = array("d"), array("d")
        self.total_s = 0.0
        """Of all waits so far."""

    def __len__(self) -> int:
        return len(self._ended_s)

    def timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``original``, timed, even if it raises as the last call of an iterator does."""
        clock, thread_of = time.perf_counter, threading.get_ident

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside or thread_of() != self._thread:
                return original(*args, **kwargs)
            self._inside, began_s = True, clock()
            try:
                return original(*args, **kwargs)
            finally:
                ended_s = clock()
                self._inside = False
                self._ended_s.append(ended_s)
                self._lasted_s.append(ended_s - began_s)
                self.total_s += ended_s - began_s

        return call

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def between(self, begin_s: float, end_s: float) -> float:
        """Return the seconds waited between two times of ``time.perf_counter``."""
        pairs = zip(self._ended_s, self._lasted_s, strict=True)
        return sum(max(min(end, end_s) - max(end - lasted, begin_s), 0.0) for end, lasted in pairs)
