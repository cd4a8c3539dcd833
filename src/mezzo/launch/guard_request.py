"""What a command asks of a run's guardrails."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from mezzo.records import AlarmKind, GuardAction


class GuardRequest(BaseModel):
    """What to do when an alarm is raised."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    action: GuardAction = "note"
    rewinds: int = 0
    """How often the run may return to a snapshot."""
    together: bool = False
    """Whether the processes of a job act on an alarm at the same step."""
    commands: dict[AlarmKind, str] = {}
    """What to type next, by kind of alarm."""
