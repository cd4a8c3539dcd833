"""Records in trackers of experiments: ``--log-to tensorboard``, ``--log-to wandb``, ``--log-to mlflow``.

A new tracker needs a file in this folder with ``PACKAGE``, ``INSTALL``, ``check``, ``send`` and ``InFlight``, and a row in ``TRACKERS``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from mezzo.errors import UsageError, nearest
from mezzo.records import AnyRecord
from mezzo.report.tracking import mlflow, tensorboard, wandb
from mezzo.report.tracking.inflight import Flight as Flight
from mezzo.report.tracking.inflight import Writer as Writer
from mezzo.report.tracking.job import TrackedRecord as TrackedRecord
from mezzo.report.tracking.logged import Logged, logged


@dataclass(frozen=True, kw_only=True)
class Tracker:
    """One tracker: its library, and the functions that log to it."""

    package: str
    """What is imported."""
    install: str
    """What pip installs."""
    check: Callable[[str], None]
    """Refuses what cannot be logged to, before a script runs."""
    send: Callable[[Logged, TrackedRecord, str], str]
    """Logs, and returns where."""
    in_flight: Callable[[Flight, str], Writer]
    """Starts to log a run that is under way."""


TRACKERS = {
    name: Tracker(package=made.PACKAGE, install=made.INSTALL, check=made.check, send=made.send, in_flight=made.InFlight)
    for name, made in {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}.items()
}


@dataclass(frozen=True, kw_only=True)
class Destination:
    """What ``--log-to`` names: a tracker and, after a colon, a place in its own terms."""

    name: str
    place: str = ""

    @property
    def tracker(self) -> Tracker:
        """The tracker."""
        return TRACKERS[self.name]

    @property
    def folder(self) -> str:
        """The folder that the place is; empty if it is something else."""
        return self.place if self.name == "tensorboard" else ""


def destination(text: str) -> Destination:
    """Return the destination that ``text`` names, its library installed and its place open.

    Raises:
        UsageError: there is no such tracker, its library is missing, or nothing can be logged there.
    """
    name, _, place = text.partition(":")
    if name not in TRACKERS:
        raise UsageError(
            f"--log-to {text!r} names no tracker; {nearest(name, TRACKERS)}",
            hint="type: --log-to tensorboard, or with a place: --log-to tensorboard:DIR",
        )
    found = Destination(name=name, place=place)
    if importlib.util.find_spec(found.tracker.package) is None:
        raise UsageError(
            f"--log-to {text}: {found.tracker.package} is not installed",
            hint=f"pip install {found.tracker.install}, or leave the option out",
        )
    found.tracker.check(place)
    return found


def send(record: AnyRecord, job: TrackedRecord, to: Destination) -> str:
    """Log ``record`` and return where it was logged."""
    return to.tracker.send(logged(record), job, to.place)
