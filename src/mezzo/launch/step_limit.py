"""A run of a script's first steps only, when the whole script would take too long. Imports no torch."""

from __future__ import annotations

import time

from mezzo.observe.stopping import StopScript


class StepLimit:
    """The step, or the time, after which a script is stopped; the step that is open then is finished first."""

    def __init__(self, *, steps: int | None, seconds: float | None) -> None:
        self._steps = steps
        self._end_s = None if seconds is None else time.monotonic() + seconds
        self.stopped = False
        """Whether it has stopped the script."""

    def check(self, num_closed: int) -> None:
        """Stop the script if ``num_closed`` steps are enough.

        Raises:
            StopScript: they are.
        """
        enough = self._steps is not None and num_closed >= self._steps
        if enough or (self._end_s is not None and time.monotonic() >= self._end_s):
            self.stopped = True
            raise StopScript
