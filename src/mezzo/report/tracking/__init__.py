"""Records in experiment trackers: ``--log-to tensorboard``, ``--log-to wandb``, ``--log-to mlflow``.

A new tracker needs a file in this folder with ``PACKAGE``, ``INSTALL``, ``check``, ``send`` and ``LiveWriter``, and a row in ``TRACKERS``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from mezzo.errors import UsageError, nearest
from mezzo.records import AnyRecord
from mezzo.report.log_entries import LiveRun as LiveRun
from mezzo.report.log_entries import LogEntry, log_entry
from mezzo.report.log_entries import TrackedRecord as TrackedRecord
from mezzo.report.log_entries import Writer as Writer
from mezzo.report.tracking import mlflow, tensorboard, wandb

_FIRST = "tensorboard"


@dataclass(frozen=True, kw_only=True)
class Tracker:
    """One tracker: its library, and the functions that log to it."""

    package: str
    """What is imported."""
    install: str
    """What pip installs."""
    check: Callable[[str], None]
    """Refuses a place that cannot be logged to, before a script runs."""
    send: Callable[[LogEntry, TrackedRecord, str], str]
    """Logs a record, and returns where."""
    live_writer: Callable[[LiveRun, str], Writer]
    """Starts logging a run while it runs."""


TRACKERS = {
    name: Tracker(
        package=module.PACKAGE,
        install=module.INSTALL,
        check=module.check,
        send=module.send,
        live_writer=module.LiveWriter,
    )
    for name, module in {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}.items()
}


@dataclass(frozen=True, kw_only=True)
class Destination:
    """The value of ``--log-to``: a tracker and, after a colon, a place in the tracker's own terms."""

    name: str
    place: str = ""

    @property
    def tracker(self) -> Tracker:
        """The tracker."""
        return TRACKERS[self.name]

    @property
    def folder(self) -> str:
        """The place if it is a folder; empty otherwise."""
        return self.place if self.name == "tensorboard" else ""


def destination(text: str, *, retyped: Callable[[str], str] = "--log-to {}".format) -> Destination:
    """Return the destination that ``text`` names, after checking that its library is installed and its place can be used.

    Args:
        text: a tracker's name, and perhaps a place after a colon.
        retyped: writes what to type for another destination.

    Raises:
        UsageError: there is no such tracker, its library is missing, or nothing can be logged there.
    """
    name, colon, place = text.partition(":")
    if name not in TRACKERS:
        raise UsageError(
            f"--log-to {text!r} names no tracker; {nearest(name, TRACKERS)}",
            hint=f"type: {retyped(f'{next(iter(get_close_matches(name, TRACKERS, n=1)), _FIRST)}{colon}{place}')}",
        )
    to = Destination(name=name, place=place)
    if importlib.util.find_spec(to.tracker.package) is None:
        raise UsageError(
            f"--log-to {text}: {to.tracker.package} is not installed",
            hint=f"pip install {to.tracker.install}, or leave the option out",
        )
    to.tracker.check(place)
    return to


def send(record: AnyRecord, tracked: TrackedRecord, to: Destination) -> str:
    """Log ``record`` and return where it was logged."""
    return to.tracker.send(log_entry(record), tracked, to.place)
