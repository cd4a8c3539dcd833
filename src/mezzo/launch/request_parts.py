"""Parts of a request: a command's settings for a run's snapshots, guard, trace and models. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from mezzo.records import AlarmKind, GuardAction


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TwinRequest(_Part):
    """What a twin does: resume one snapshot, and write digests of its state some updates later."""

    snapshot: str
    """The snapshot's file."""
    answer: int
    """Descriptor of the open file for the digests."""


class SnapshotRequest(_Part):
    """Where and how often to save the state of a script, and whether to resume from a saved one."""

    folder: str
    every_s: float
    resume: bool
    identity: dict[str, str]
    """What must be the same in a resumed run and in the one that was stopped: script, arguments, policy."""
    hash_seed: str = "0"
    """Value of ``PYTHONHASHSEED``, from which the order of a set of texts follows."""
    may_be_first: bool = False
    """Whether a run that is to be resumed starts from the beginning if there is no snapshot yet."""
    rank: int = 0
    ranks: int = 1
    """Number of processes of the job; each saves into a folder of its own."""
    proves: bool = False
    """Whether the first snapshot of a run is proven by a twin."""
    twin: TwinRequest | None = None
    """None in a run of its own."""
    meeting: str = ""
    """A folder in which the processes of this run tell each other which snapshots they can resume."""

    def for_rank(self, rank: int, *, ranks: int, meeting: str) -> SnapshotRequest:
        """Return the request for one process of several."""
        folder = str(Path(self.folder) / f"rank-{rank}-of-{ranks}")
        return self.model_copy(update={"folder": folder, "rank": rank, "ranks": ranks, "meeting": meeting})


class GuardRequest(_Part):
    """What to do when an alarm is raised."""

    action: GuardAction = "note"
    rewinds: int = 0
    """How many times the run may return to a snapshot."""
    together: bool = False
    """Whether the processes of a job act on an alarm at the same step."""
    commands: dict[AlarmKind, str] = {}
    """The command to type next, by kind of alarm."""


class TraceRequest(_Part):
    """Where to write the trace of a run's state, and when to end the run the way a scheduler preempts a job."""

    path: str
    stop_after: int | None = None
    """End the run before the first forward pass after this many updates; None lets it end by itself."""
    notice_s: float = 10.0
    """How long a script with a SIGTERM handler of its own may take to end; others are killed immediately."""
    first_seed: int | None = None
    """Seed of the global generators before the script sets its own; None leaves them as they are."""


class ModelChanges(_Part):
    """Changes to every model of the script at its first call, besides its precision."""

    channels_last: bool = False
    """Store convolution weights and images channels-last."""
    compiles: bool = False
    """Compile the model with ``torch.compile``."""
    checkpoint: str = ""
    """Checkpoint each model by this plan, or within this many bytes, at its first call in training; empty for no checkpointing."""
    counts_inputs: bool = False
    """Count each step's input elements, so that steps on batches of different sizes can be compared."""


class ScriptFile(NamedTuple):
    """The file of a script, as Python would run it."""

    path: str
    folder: str
    """Below it are the script's own modules."""
    package: str | None
    """That of a module, as for ``python -m``."""
    request: str
    """The run's request as JSON."""
