"""What a session changes from update to update, besides its models, optimizers, schedulers and scales.

One value: snapshots, captured graphs, guards and micro-batches read it and write it, and nothing else of a session that is private.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mezzo.engine.progress import Progress
from mezzo.engine.snapshots.position import Position
from mezzo.engine.window import Window

if TYPE_CHECKING:
    from mezzo.engine.loop_checks import NoWatch, Ownership
    from mezzo.engine.schedules import Schedules
    from mezzo.engine.session import Session
    from mezzo.engine.snapshots.resumable import Snapshots


@dataclass(slots=True)
class SessionState:
    """The state of one session."""

    window: Window
    """The open window: its backward passes and their weights."""
    progress: Progress
    """Updates, skipped ones, the last norm."""
    schedules: Schedules
    """Which scheduler steps are still to be made."""
    position: Position
    """The passes over the data."""
    snapshots: Snapshots
    """The folder that it saves to, and the save in progress."""
    watch: NoWatch
    """The checks of the first windows; later ``NoWatch``."""
    ownership: Ownership
    """Whether the models' weights are still those that the session was built with."""


def open_window(session: Session) -> None:
    """Begin a window, without gradients."""
    session.state.window.open(session.accumulate, len(session.scales))
    if (
        session.accumulate > 1 or not session.state.progress.windows
    ):  # else every backward pass exchanges, as the last one did
        session.processes.expect(0)
