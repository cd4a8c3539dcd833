"""What a command asks of a run's snapshots."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict


class SnapshotRequest(BaseModel):
    """Where and how often to save the state of a script, and whether to begin from what is there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str
    every_s: float
    resume: bool
    identity: dict[str, str]
    """What a resumed run has to have in common with the one that was stopped: script, arguments, policy."""
    may_be_first: bool = False
    """Whether a run that is to be resumed begins anew where there is no snapshot yet."""
    rank: int = 0
    ranks: int = 1
    """Processes of the job; each saves into a folder of its own."""
    meeting: str = ""
    """A folder in which the processes of this run say which snapshots they can resume."""

    def for_rank(self, rank: int, *, ranks: int, meeting: str) -> SnapshotRequest:
        """Return what one process of several is asked."""
        return self.model_copy(
            update={
                "folder": str(Path(self.folder) / f"rank-{rank}-of-{ranks}"),
                "rank": rank,
                "ranks": ranks,
                "meeting": meeting,
            }
        )
