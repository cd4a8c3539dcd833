"""Take the time of steps: by events in a GPU's queue where there is one, else by the host's clock.

A host that never waits for its GPU runs ahead of it: its clock would tell how long a step takes to enqueue, and a policy that reads a
flag every step would look slow beside one that does not. Events are read when they are long over, so nobody waits for them.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

import torch

_UNREAD = 64
"""Events that may wait to be read: a step's is over long before 64 more were enqueued."""


class _Mark(NamedTuple):
    """When a step ended."""

    host_s: float
    cpu_s: float
    event: Any
    """A ``torch.cuda.Event``; None off GPUs."""


class StepClock:
    """How long each step took."""

    def __init__(self) -> None:
        self.device: torch.device | None = None
        """The device that the run trains on, once known."""
        self._ended: _Mark | None = None
        self._last = self._mark()
        self._time_ms: list[float] = []
        self._cpu_ms: list[float] = []
        self._unread: deque[tuple[int, _Mark, _Mark]] = deque()
        """Steps by number, with their ends, whose times are the host's so far."""
        self._free: list[Any] = []
        """Events to use again."""

    def mark(self) -> None:
        """Take the time of an update; the last one before the step closes counts."""
        self._ended = self._mark(None if self._ended is None else self._ended.event)

    def close(self) -> None:
        """Close the step at its last mark, or now."""
        last, self._last = self._last, self._ended or self._mark()
        self._ended = None
        self._time_ms.append((self._last.host_s - last.host_s) * 1e3)
        self._cpu_ms.append((self._last.cpu_s - last.cpu_s) * 1e3)
        if last.event is not None and self._last.event is not None:
            self._unread.append((len(self._time_ms) - 1, last, self._last))
            if len(self._unread) > _UNREAD and self._unread[0][2].event.query():
                self._read_first()

    @property
    def cpu_ms(self) -> list[float]:
        """Return the process's CPU time of each step."""
        return self._cpu_ms

    def time_ms(self) -> list[float]:
        """Return the time of each step; waits for the device."""
        try:
            if self._unread:
                self._unread[-1][2].event.synchronize()
            while self._unread:
                self._read_first()
        except RuntimeError:  # the device has failed: the host's times stay
            self._unread.clear()
        return self._time_ms

    def _read_first(self) -> None:
        number, begin, end = self._unread[0]
        self._time_ms[number] = begin.event.elapsed_time(end.event)
        self._unread.popleft()
        self._free.append(begin.event)

    def _mark(self, event: Any = None) -> _Mark:
        return _Mark(time.perf_counter(), time.process_time(), self._recorded(event))

    def _recorded(self, event: Any) -> Any:
        """Return an event at the end of what is enqueued; None off GPUs and inside a graph that a script captures."""
        if self.device is None or self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return None
        if event is None:
            event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
