"""Time steps: with events in the queue of a GPU if there is one, else with the host's clock.

A host that never waits for its GPU runs ahead of it: its clock would measure how long a step takes to enqueue, and a policy that reads a
flag in every step would look slow next to one that does not. Events are read long after they have happened, so nothing waits for them.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, TypeAlias

import torch

_UNREAD = 64
"""Events kept before the first is read: a step's event has happened long before 64 more are enqueued."""
STEPS_PER_CPU_READING = 10
"""Steps between readings of the CPU time in a steady run: each is a system call of 1 to 3 us."""

Mark: TypeAlias = tuple[float, float | None, Any]
"""End of a step: the host's clock and the process's CPU time in seconds (None if that was not read), and a ``torch.cuda.Event`` (None
off GPUs)."""


class StepClock:
    """A clock that times each step."""

    def __init__(self) -> None:
        self.device: torch.device | None = None
        """The device that the run trains on, once known; the queue of a GPU is timed."""
        self.ended: Mark | None = None
        """The last mark of the open step."""
        self._last = self._mark()
        self.began_s = self._last[0]
        """Time of ``time.perf_counter`` from which the first step counts."""
        self._time_ms: list[float] = []
        self._cpu_ms: list[float] = []
        self._last_cpu_s = time.process_time()
        self._num_unshared = 0
        """Steps since the last reading of the CPU time."""
        self._unread: deque[tuple[int, Mark, Mark]] = deque()
        """Steps by number, with both ends, that still have the host's times."""
        self._free: list[Any] = []
        """Events to reuse."""

    def begin_on(self, device: torch.device | None) -> None:
        """Time the queue of this device from now on."""
        self.device = device

    def mark(self) -> None:
        """Record the time of an update; the last one before the step closes counts."""
        self.ended = self._mark(None if self.ended is None else self.ended[2])

    def take(self) -> Mark:
        """End the step at its last mark, or now; ``add`` that mark before another step's."""
        now, self.ended = self.ended or self._mark(), None
        return now

    def add(self, *ends: Mark) -> None:
        """Add the times of the steps that ended at ``ends``."""
        begins, self._last = (self._last, *ends[:-1]), ends[-1]
        if self.device is not None and self.device.type == "cuda":
            first = len(self._time_ms)
            for step, (last, now) in enumerate(zip(begins, ends, strict=True), start=first):
                if last[2] is not None and now[2] is not None:
                    self._unread.append((step, last, now))
        self._time_ms += [(now[0] - last[0]) * 1e3 for last, now in zip(begins, ends, strict=True)]
        for _, cpu_s, _ in ends:
            if cpu_s is None:
                self._num_unshared += 1
            else:
                self._share_cpu(cpu_s)
        while len(self._unread) > _UNREAD and self._unread[0][2][2].query():
            self._read_first()

    def _share_cpu(self, cpu_s: float) -> None:
        """Add the CPU time of a step and of those before it whose ends were not read."""
        num_steps = self._num_unshared + 1
        self._cpu_ms += [(cpu_s - self._last_cpu_s) * 1e3 / num_steps] * num_steps
        self._last_cpu_s, self._num_unshared = cpu_s, 0

    def cpu_ms(self) -> list[float]:
        """Return the process's CPU time in each step: between two readings their mean, after the last reading the latest mean."""
        return self._cpu_ms + self._cpu_ms[-1:] * self._num_unshared

    def time_ms(self) -> list[float]:
        """Return the time of each step; waits for the device."""
        try:
            if self._unread:
                self._unread[-1][2][2].synchronize()
            while self._unread:
                self._read_first()
        except RuntimeError:  # the device has failed: keep the host's times
            self._unread.clear()
        return self._time_ms

    def _read_first(self) -> None:
        number, (_, _, begin), (_, _, end) = self._unread[0]
        self._time_ms[number] = begin.elapsed_time(end)
        self._unread.popleft()
        self._free.append(begin)

    def _mark(self, event: Any = None) -> Mark:
        return (time.perf_counter(), time.process_time(), self._recorded(event))

    def _recorded(self, event: Any) -> Any:
        """Return an event at the end of the queue; None off GPUs and while the script captures a graph."""
        if self.device is None or self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return None
        if event is None:
            event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
