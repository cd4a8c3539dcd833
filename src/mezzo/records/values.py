"""Parts that all records share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticSerializationError

from mezzo.readable import readable

SCHEMA_VERSION = 1


def _readable_in(value: Any) -> Any:
    if isinstance(value, dict):
        return {_readable_in(key): _readable_in(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_readable_in(each) for each in value]
    return readable(value) if isinstance(value, str) else value


class Value(BaseModel):
    """A part of a record: frozen, and numbers that are not finite survive JSON."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        ser_json_inf_nan="strings",
        allow_inf_nan=True,
        defer_build=True,  # a command uses one or two of a hundred classes
    )

    def model_dump_json(self, **options: Any) -> str:
        """Return the JSON, with all texts ``readable``."""
        try:
            return super().model_dump_json(**options)
        except PydanticSerializationError:
            return type(self).model_validate(_readable_in(self.model_dump())).model_dump_json(**options)


class WholeRecord(Value):
    """A record, as opposed to a part of one: it prints as one line. ``mezzo.notebook`` shows its page in Jupyter."""

    kind: str
    schema_version: int = SCHEMA_VERSION

    @property
    def summary(self) -> str:
        """The script, the verdict and the figures that matter most, in one line."""
        raise NotImplementedError

    def __repr__(self) -> str:
        words = "".join(letter if letter.isprintable() else " " for letter in self.summary)  # names come from scripts
        return f"<{type(self).__name__} {words}>"

    def __str__(self) -> str:
        return repr(self)

    def __rich_repr__(self) -> Iterator[str]:
        yield self.summary


class Note(Value):
    """One choice, and the reason for it."""

    what: str
    value: str
    reason: str


class Environment(Value):
    """The machine and the versions behind a measurement."""

    date: str
    mezzo: str
    python: str
    torch: str
    os: str
    cpu: str
    threads: int
    device: str
    """torch's device type that the model ran on."""
    gpu: str | None = None
    driver: str | None = None
    cuda: str | None = None
    cudnn: str | None = None
    triton: str | None = None
    variables: dict[str, str] = {}
    """Environment variables that change what a training computes or where it runs, as the shell set them; never secrets."""
    folder: str = ""
    """The folder in which the command was typed."""


class NamedByPolicy:
    """The names of runs that differ in their policy and in how they are checkpointed."""

    if TYPE_CHECKING:  # fields of the record itself, which decides their place in its JSON
        policy: str
        policy_typed: str
        checkpoint: str

    @property
    def policy_shown(self) -> str:
        """The policy's name for people: as they typed it, and how its runs are checkpointed."""
        return varied(self.policy_typed or self.policy, self.checkpoint)

    @property
    def compared_as(self) -> str:
        """What identifies the runs in a comparison: their policy, and how they are checkpointed."""
        return varied(self.policy, self.checkpoint)


def varied(policy: str, checkpoint: str) -> str:
    """Return the name of runs under a policy that are checkpointed by a plan; an empty plan is none."""
    return f"{policy}, checkpointed {checkpoint}" if checkpoint else policy


# --- Findings --------------------------------------------------------------------------------------------------------------------

Severity: TypeAlias = Literal["", "error", "warning", "info"]


class Finding(Value):
    """One thing to change, and what changing it gains."""

    code: str
    title: str
    modules: list[str]
    detail: str
    gain: str
    fix: str
    share: float = 0.0
    """Share of the step's product FLOPs that it affects; for casts, of the step's bytes."""
    flops: int = 0
    bytes: int = 0
    lines: list[str] = []
    severity: Severity = ""
    """Of a misuse of the script's own mixed precision: training is wrong (error), may be wrong (warning), or may be as meant (info)."""
    step: int | None = None
    """The first step in which it occurred."""
    count: int = 1
    """How often it occurred in the inspected steps."""


# --- The bottleneck of a run -----------------------------------------------------------------------------------------------------

Limit = Literal["input", "waiting", "communication", "host", "power", "bandwidth", "arithmetic", "unknown"]
"""What limits a run: loading batches, a lock or sleep, other processes, Python and tiny kernels, a power limit, memory bandwidth, or
matrix products."""


class GpuUse(Value):
    """A GPU's counters, as the driver's library (NVML) reported them each second. None: the GPU does not report it."""

    name: str
    num_samples: int
    utilization: float | None = None
    """Mean share of the time in which any kernel ran."""
    memory_share: float | None = None
    """Largest share of the memory in use, by all processes."""
    power_w: float | None = None
    """Mean power."""
    power_limit_w: float | None = None
    temperature_c: float | None = None
    """The highest temperature."""
    clock_mhz: float | None = None
    """Mean clock of the multiprocessors."""
    clock_limit_mhz: float | None = None
    throttled: dict[str, float] = {}
    """Share of the samples in which the clock was throttled, by reason: ``power limit``, ``heat``, ``power brake``."""


class Bottleneck(Value):
    """What held a run back, from its steps after the first tenth."""

    limit: Limit
    sentence: str
    """Why that is what limits it, with the share that decides."""
    change: list[str] = []
    """What to change, the most promising first."""
    shares: dict[str, float] = {}
    """Share of the time by ``input``, ``communication``, ``waiting``, ``host``, ``bandwidth`` and ``arithmetic``, as far as measured.

    ``preempted`` is the share of the whole time that other processes took; the others are shares of the rest.
    """
    line: str = ""
    """The line of the script that was most often executing while its thread slept, if waiting holds the run back."""
    operations: int | None = None
    """Operations of one step; None where they were not counted."""
    operation_us: float | None = None
    """Their mean time on the host."""
    gpu: GpuUse | None = None
    not_measured: list[Note] = []
    """What could not be measured, and why."""


# --- Guardrails and memory that ran out ------------------------------------------------------------------------------------------

AlarmKind: TypeAlias = Literal[
    "loss not finite", "skip storm", "scale at its floor", "loss spike", "gradients zero", "stuck updates"
]
GuardAction: TypeAlias = Literal["note", "stop", "rewind"]


class Alarm(Value):
    """One thing that went wrong while a training ran."""

    kind: AlarmKind
    step: int
    """The step after which it was certain, counted from 1."""
    since: int
    """The first step of the evidence."""
    evidence: str
    """What was measured, and the limit that it exceeded, in a sentence."""
    command: str = ""
    """What to type next; empty where Mezzo cannot know it, as in a session of the user's own script."""


class Rewind(Value):
    """A return to a snapshot."""

    alarm: AlarmKind
    step: int
    """The step after which the training returned."""
    snapshot: str
    """File name of the snapshot."""
    updates: int
    """Updates made before that snapshot."""
    changes: list[Note]
    """What changed for the rest of the run, and why."""
    changed_policy: bool = False
    """Whether the policy is among the changes."""


class Guardrails(Value):
    """What the guardrails of a run noticed, and what they did."""

    action: GuardAction
    alarms: list[Alarm] = []
    rewinds: list[Rewind] = []
    only_noted: str = ""
    """Why alarms were only noted although the run was to stop or return to a snapshot; empty otherwise."""
    stopped: str = ""
    """Why the run was stopped; empty if it was not."""


class HeldModule(Value):
    """A module, and the bytes of its parameters, their gradients and their optimizer state."""

    name: str
    bytes: int


class OutOfMemory(Value):
    """What occupied the memory when the script ran out of it."""

    step: int
    """The step in which it ran out, counted from 1."""
    message: str
    """The error's first line."""
    asked_bytes: int | None = None
    """The size of the failed allocation; None if the error does not say."""
    held_bytes: dict[str, int] = {}
    """By kind: parameters, gradients, optimizer state, saved activations, other."""
    modules: list[HeldModule] = []
    """The largest five."""
    not_known: list[Note] = []
    """What could not be measured, and why."""
    settings: list[Note] = []
    """Settings that would fit or save memory: what to write, what it saves, and the reason."""
