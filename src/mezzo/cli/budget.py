"""A command's time limit, counted down and shown with each message."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from mezzo.cli.durations import clock

if TYPE_CHECKING:
    from rich.console import Console


class Budget:
    """A time limit, and how much of it is left."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._began = seconds, time.monotonic()
        self.console: Console | None = None
        """Where to print; None for standard error. A console keeps the progress line below what is printed."""

    @property
    def spent_s(self) -> float:
        """The seconds since the command began."""
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        """Print a message, with the time that has passed and the time that is left."""
        left = max(self.seconds - self.spent_s, 0.0)
        line = f"[{clock(self.spent_s)}, {clock(left)} left] {text}"
        if self.console is None:
            print(line, file=sys.stderr, flush=True)
        else:
            self.console.print(line, markup=False, soft_wrap=True)
