"""Run only a script's first steps, if the whole script would take too long. Imports no torch."""

from __future__ import annotations

import time

from mezzo.observe.settings import StopScript

_AFTER_FIRST = 0.1
"""Share of the limit granted after the first step, however long that took: it may be mostly compilation, with short steps to follow."""


class StepLimit:
    """The number of steps, or the time, after which a script is stopped; an open step is finished first."""

    def __init__(self, *, steps: int | None, seconds: float | None) -> None:
        self._steps, self._seconds = steps, seconds
        self._began_s = time.monotonic()
        self._least_end_s: float | None = None
        self.stopped = False
        """Whether the limit has stopped the script."""

    def check(self, num_closed: int) -> None:
        """Stop the script if it has made enough steps, or used up its time.

        Raises:
            StopScript: the limit is reached.
        """
        enough = self._steps is not None and num_closed >= self._steps
        if enough or (self._seconds is not None and self._is_over(self._seconds)):
            self.stopped = True
            raise StopScript

    def _is_over(self, seconds: float) -> bool:
        now = time.monotonic()
        if self._least_end_s is None:
            self._least_end_s = now + _AFTER_FIRST * seconds
        return now >= max(self._began_s + seconds, self._least_end_s)
