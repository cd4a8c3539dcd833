"""The parent's request to the child process that runs a script: one value, passed as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, PlainSerializer, PlainValidator
from pydantic_core import PydanticSerializationError

from mezzo.observe.settings import AnySettings, read_policy
from mezzo.policy import Policy
from mezzo.records import AS_IS, AlarmKind, GuardAction, Note, Placement

_FILE_PREFIX = "@"
"""Begins a word that is the name of a file with the request, not the request itself."""
NO_RECORD = 74
"""The exit code of a child process that could not write its record."""
_LONGEST_BYTES = 100_000
"""Linux allows 131072 bytes per word; a script's arguments may be the names of thousands of files."""


def policy_text(policy: Policy | None) -> str:
    """Return the name of a policy in records; None is the script's own precision."""
    return AS_IS if policy is None else str(policy)


def _read(value: Policy | str | None) -> Policy | None:
    return None if value is None or value == AS_IS else read_policy(value)


class StandIn(BaseModel):
    """A module whose ``provide`` makes a package importable that is not installed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    module: str
    reason: Note
    """The entry for the record."""


class Request(BaseModel):
    """Which script to run, how, and where to write its record."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str
    """Path of a script, or the name of a module."""
    kind: Literal["script", "module"]
    arguments: tuple[str, ...] = ()
    framework: str = "torch"
    stand_in: StandIn | None = None
    policy: Annotated[Policy | None, PlainValidator(_read), PlainSerializer(policy_text)]
    """None leaves the script's own precision alone. In JSON it is the text that records contain."""
    policy_typed: str = ""
    """The policy as typed, if that was another name for it."""
    seed: int | None = None
    """Added to every seed that the script sets; None leaves seeds alone."""
    metric: str | None = None
    """Regular expression whose first group is a number in the script's output."""
    record_path: str
    command: tuple[str, ...]
    """The command line that was typed, for the record."""
    observe: AnySettings | None = None
    """Settings of the observer, which determine the kind of record; None only records the steps."""
    compared_since_s: float | None = None
    """Unix time at which the run's comparison began, to record which files of other runs it reads; None outside a comparison."""
    stop_after_steps: int | None = None
    """Stop the script after this many steps; None lets it end by itself."""
    stop_after_s: float | None = None
    """Stop the script at the end of the step in which this many seconds have passed since it began."""
    snapshots: SnapshotRequest | None = None
    guard: GuardRequest | None = None
    """None if nothing watches for alarms."""
    models: ModelChanges | None = None
    """What to change in the script's models besides their precision; None changes nothing."""
    output_to_stderr: bool = False
    """Whether the script's standard output goes to standard error, because the command prints JSON to standard output."""

    rank: int | None = None
    """The rank of this process in its job; None for the only process."""
    variables: dict[str, str] = {}
    """Environment variables for this run, which override the command's."""
    work_folder: str | None = None
    """The folder to run the script in; None for the command's."""
    import_paths: tuple[str, ...] = ()
    """Folders to import from before all others but the script's own."""
    tape_file: str = ""
    """The file for the operations of a step, for a prediction; empty to record none. Only of frameworks other than PyTorch."""
    trace: TraceRequest | None = None
    """Whether to trace the state of the training, and where to stop it; None for neither."""

    digest: str = ""
    """Digest of everything that determines the run's result, for the record; empty if no later command looks for a finished run."""
    earlier_update_s: float | None = None
    """Unix time of the first update of an earlier attempt at this run, which was stopped; None without one."""
    placement: Placement | None = None
    """The run's share of the machine, for the record; None if it has the whole machine."""

    reports_progress: bool = False
    """Whether the child reports the latest step to ``progress_file``."""
    watches: bool = False
    """Whether the progress display shows what the script waits for."""

    def model_dump_json(self, **options: Any) -> str:
        """Return the JSON, also of names of files that are not in the encoding of this process."""
        try:
            return super().model_dump_json(**options)
        except PydanticSerializationError:
            return json.dumps(self.model_dump(mode="json"))

    @classmethod
    def of_json(cls, text: str) -> Request:
        """Return the request in a JSON."""
        return cls.model_validate(json.loads(text))

    def packed(self) -> str:
        """Return the request as one command-line word: JSON, or the name of a file if the JSON is too long for the system."""
        text = self.model_dump_json()
        if len(text.encode()) <= _LONGEST_BYTES:
            return text
        self.file.write_text(text, encoding="utf-8")
        return f"{_FILE_PREFIX}{self.file}"

    @classmethod
    def unpacked(cls, word: str) -> Request:
        """Return the request that ``word`` contains or names."""
        in_file = word.startswith(_FILE_PREFIX)
        text = Path(word.removeprefix(_FILE_PREFIX)).read_text(encoding="utf-8") if in_file else word
        return cls.of_json(text)

    @property
    def file(self) -> Path:
        """The file for a request that is too long for a word."""
        return Path(self.record_path).absolute().with_suffix(".request")

    @property
    def position_file(self) -> Path:
        """The file to which the child of one rank writes its traceback when a signal asks for it."""
        return Path(self.record_path).absolute().with_suffix(".position")

    @property
    def progress_file(self) -> Path:
        """The file to which the child reports its progress."""
        return Path(self.record_path).absolute().with_suffix(".progress")

    @property
    def updated_file(self) -> Path:
        """The file whose modification time is the time of the first update, for a later attempt at the same run."""
        return Path(self.record_path).absolute().with_suffix(".updated")


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
    """What must be the same in a stopped run and its resumption: script, arguments, policy."""
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
    compile_only: tuple[str, ...] = ()
    """The modules to compile, by name, each for itself; empty for the whole model."""
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
    """The module's name, as for ``python -m``."""
    request: str
    """The run's request as JSON."""
