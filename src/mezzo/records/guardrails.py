"""What the guardrails of a run noticed and did, and what occupied the memory when it ran out."""

from __future__ import annotations

from typing import Literal, TypeAlias

from mezzo.records.values import Reason, Value

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
    changes: list[Reason]
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
    not_known: list[Reason] = []
    """What could not be measured, and why."""
    settings: list[Reason] = []
    """Settings that would fit or save memory: what to write, what it saves, and the reason."""
