"""A command's time limit, counted down and shown with each message."""

from __future__ import annotations

import re
import sys
import time
from typing import TYPE_CHECKING

from mezzo.cli.words import typed, with_value
from mezzo.errors import UsageError

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


# --- Durations as users type and read them: ``90s``, ``10m``, ``1h``; ``9:56`` --------------------------------------------------

_UNITS_S = {"s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smh])", re.IGNORECASE)
_UNIT_WORDS = ("s", "sec", "seconds", "m", "min", "minutes", "h", "hour", "hours", "d", "day", "days")
_NEARLY = re.compile(r"(\d+(?:\.\d+)?) *([smhd]?)", re.IGNORECASE)


def seconds_of(text: str, *, option: str, example: str) -> float:
    """Return the seconds in an option's value, such as ``90s``, ``10m`` or ``1h``.

    Raises:
        UsageError: the value is not a duration above 0.
    """
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _UNITS_S[match[2].lower()] if match else 0.0
    if seconds <= 0:
        unit = next((word for word in _words_after(option) if word.lower() in _UNIT_WORDS), "")
        meant = _meant(f"{text}{unit}", example)
        raise UsageError(
            f"{option} {text!r}; allowed: a time above 0 with its unit, such as 30s, 5m or 1h",
            hint=f"type: {with_value(option, meant, skipped=_UNIT_WORDS)}",
        )
    return seconds


def _words_after(option: str) -> tuple[str, ...]:
    """Return the word after an option's value, as typed; nothing if there is none."""
    words = typed()
    place = words.index(option) + 2 if option in words else len(words)
    return words[place : place + 1]


def _meant(text: str, example: str) -> str:
    """Return the duration that was probably meant; a bare number of 60 or more was in seconds, as in older versions."""
    found = _NEARLY.match(text.strip())
    if found is None or float(found[1]) == 0:
        return example
    unit = found[2].lower() or ("s" if float(found[1]) >= 60 or example.endswith("s") else "m")
    return f"{24 * int(float(found[1]))}h" if unit == "d" else f"{found[1]}{unit}"


def clock(seconds: float) -> str:
    """Return a duration as a clock shows it: ``9:56``, ``1:00:00``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
