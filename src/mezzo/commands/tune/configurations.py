"""The configurations of a search: all combinations of policies, values of the script's own options, and changes to its models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from mezzo.records import AS_IS

Changes = tuple[bool, bool]
"""Whether the models are channels-last, and whether they are compiled."""
CHANGES: dict[str, Changes] = {
    "as-is": (False, False),
    "channels-last": (True, False),
    "compile": (False, True),
    "channels-last+compile": (True, True),
}


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One way to run the script."""

    policy: str = AS_IS
    settings: tuple[tuple[str, str], ...] = ()
    """Options of the script by name, each with its value; options that are not here stay as typed."""
    channels_last: bool = False
    compiles: bool = False
    checkpoint: str = ""
    """The plan of activation checkpointing, or its budget; empty for none."""

    @property
    def name(self) -> str:
        """The configuration for people: ``bf16, batch-size 64, channels-last``."""
        parts = [self.policy, *(f"{name} {value}" for name, value in self.settings)]
        parts += ["channels-last"] * self.channels_last + ["compiled"] * self.compiles
        parts += [f"checkpointed {self.checkpoint}"] * bool(self.checkpoint)
        return ", ".join(parts)

    def arguments(self, own: Sequence[str]) -> list[str]:
        """Return the script's arguments: ``{name}`` becomes the value; without that, the option is appended."""
        arguments = list(own)
        for name, value in self.settings:
            if _has_placeholder(name, own):
                arguments = [word.replace(f"{{{name}}}", value) for word in arguments]
            else:
                arguments += [f"-{name}" if len(name) == 1 else f"--{name}", value]
        return arguments


def grid(
    policies: Sequence[str],
    vary: Mapping[str, Sequence[str]],
    changes: Sequence[Changes],
    own: Sequence[str],
    *,
    checkpoints: Sequence[str] = (),
) -> list[Configuration]:
    """Return all configurations; the first is what the script does now, then what was asked for.

    Values of the script's options come before policies, and changes to the models last: compiling takes longest, and a budget may end.

    Args:
        policies: policies besides the script's own precision.
        vary: values of the script's options by name. Where ``own`` has ``{name}``, the first value is the present one.
        changes: changes to the models besides none.
        own: the script's arguments as typed.
        checkpoints: plans of activation checkpointing besides none.
    """
    settings = list(_settings(vary, own))
    found = [
        Configuration(
            policy=policy, settings=chosen, channels_last=channels_last, compiles=compiles, checkpoint=checkpoint
        )
        for channels_last, compiles in dict.fromkeys([(False, False), *changes])
        for checkpoint in dict.fromkeys(["", *checkpoints])
        for policy in dict.fromkeys([AS_IS, *policies])
        for chosen in settings
    ]
    return list(dict.fromkeys(found))


def _settings(vary: Mapping[str, Sequence[str]], own: Sequence[str]) -> Iterator[tuple[tuple[str, str], ...]]:
    choices: list[list[tuple[tuple[str, str], ...]]] = []
    for name, values in vary.items():
        now: list[tuple[tuple[str, str], ...]] = [] if _has_placeholder(name, own) else [()]
        present = _present_value(name, own)
        choices.append([*now, *(((name, value),) for value in dict.fromkeys(values) if value != present)])
    for chosen in product(*choices):
        yield tuple(setting for part in chosen for setting in part)


def _has_placeholder(name: str, own: Sequence[str]) -> bool:
    return any(f"{{{name}}}" in word for word in own)


def _present_value(name: str, own: Sequence[str]) -> str | None:
    """Return the value that the arguments give an option, the last one; None if they do not name it."""
    option = f"-{name}" if len(name) == 1 else f"--{name}"
    value = None
    for index, word in enumerate(own):
        if word == option and index + 1 < len(own):
            value = own[index + 1]
        elif word.startswith(f"{option}="):
            value = word.partition("=")[2]
    return value
