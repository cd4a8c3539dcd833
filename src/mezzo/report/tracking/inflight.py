"""The latest numbers of a run under way, in a tracker: a run beside that of the result, which survives if the script is killed."""

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
    """The name of its record's folder."""
    script: str
    """The script's name without .py, or the module's."""
    folder: Path
    """The folder of its record."""
    settings: Mapping[str, str]


class Writer(Protocol):
    """A run in a tracker, written while it runs."""

    where: str

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log the values of a step, so that they survive if every process is killed right after."""

    def close(self) -> None:
        """End the run."""
