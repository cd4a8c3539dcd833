"""The latest numbers of a run that is under way, in a tracker: a run of its own beside that of the result, kept when the run is killed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

SUFFIX = "-live"
"""The end of the name of a run in flight."""


@dataclass(frozen=True, kw_only=True)
class Flight:
    """A run to log while it runs."""

    name: str
    """Of its record's folder."""
    script: str
    """The script's name without .py, or the module's."""
    folder: Path
    """Of its record."""
    settings: Mapping[str, str]


class Writer(Protocol):
    """A run in a tracker, written while it runs."""

    where: str

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log values of a step, so that they stay if everything is killed after it."""

    def close(self) -> None:
        """End the run."""
