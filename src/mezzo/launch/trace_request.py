"""What ``mezzo resume-check`` asks of a run: a trace of its state, and perhaps a stop."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class TraceRequest(BaseModel):
    """Where to write the trace of a run, and when to end it as a scheduler that takes the machine away would."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    stop_after: int | None = None
    """End it before the first forward pass after so many updates; None lets it end by itself."""
    notice_s: float = 10.0
    """Time that a script with a handler of SIGTERM of its own has; others are killed at once."""
    first_seed: int | None = None
    """Seed of the global generators before the script sets its own; None leaves them as they are."""
