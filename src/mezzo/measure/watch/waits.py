"""Time the calls in which the training thread only waits, for the data loader or for other processes."""

from __future__ import annotations

import functools
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


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
