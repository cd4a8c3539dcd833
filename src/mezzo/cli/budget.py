"""A command's time limit: parsed from the command line, counted down, and shown with each message."""

from __future__ import annotations

import re
import sys
import time
from typing import TYPE_CHECKING

from mezzo.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

_UNITS_S = {"s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smh])", re.IGNORECASE)


def seconds_of(text: str, *, option: str = "--budget", example: str = "10m") -> float:
    """Return the seconds in an option's value, such as ``90s``, ``10m`` or ``1h``.

    Raises:
        UsageError: the value is not a duration.
    """
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _UNITS_S[match[2].lower()] if match else 0.0
    if seconds <= 0:
        raise UsageError(
            f"{option} {text!r}; allowed: a number above 0 with a unit, s, m or h", hint=f"type: {option} {example}"
        )
    return seconds


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


def clock(seconds: float) -> str:
    """Return a duration as a clock shows it: ``9:56``, ``1:00:00``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
