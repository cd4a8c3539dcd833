"""What a command asks of a run's snapshots."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class SnapshotRequest(BaseModel):
    """Where and how often to save the state of a script, and whether to begin from what is there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str
    every_s: float
    resume: bool
    identity: dict[str, str]
    """What a resumed run has to have in common with the one that was stopped: script, arguments, policy."""
