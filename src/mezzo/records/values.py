"""Parts that all records share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

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


class Reason(Value):
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
