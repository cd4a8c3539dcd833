"""The latest numbers of a run while it runs, in a tracker: a run of its own next to that of the result, which survives a kill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

SUFFIX = "-live"
"""The end of the name of a run that is logged while it runs."""


@dataclass(frozen=True, kw_only=True)
class LiveRun:
    """A run that is logged while it runs."""

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
        """Log the values of a step durably: they survive if every process is killed right after."""

    def close(self) -> None:
        """End the run."""
