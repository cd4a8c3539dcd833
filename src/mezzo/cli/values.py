"""The kinds of values that options have: each has one check, made while the command line is read, before anything is imported or run."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING

import typer

from mezzo.cli.vocabulary import EXAMPLES
from mezzo.cli.words import typed, with_value, without_option
from mezzo.errors import PolicyError, UsageError, nearest
from mezzo.measure.predict.names import MODEL_LIBRARIES, OPTIMIZER_NAMES, SHARDS

if TYPE_CHECKING:
    from rich.console import Console

    from mezzo.policy import Policy


Callback = Callable[[typer.Context, typer.CallbackParam, str | None], str | None]
NONE, ALL, CPU = "none", "all", "cpu"
"""Words that stand for GPUs where an option's help says so."""


def _while_read(check: Callable[[str, str, str], None]) -> Callback:
    """Return a callback that passes a value, the option's name and an example to ``check``, and returns the value."""

    def callback(context: typer.Context, parameter: typer.CallbackParam, value: str | None) -> str | None:
        if value is not None and not context.resilient_parsing:
            check(value, parameter.opts[0], str(parameter.default or EXAMPLES[str(parameter.metavar)]))
        return value

    return callback


def _check_duration(text: str, option: str, example: str) -> None:
    seconds_of(text, option=option, example=example)


def _check_size(text: str, option: str, example: str) -> None:
    from mezzo.measure.checkpointing.wanted import bytes_of_text

    try:
        bytes_of_text(text, option=option)
    except UsageError as error:
        number = "".join(c for c in text if c.isdigit() or c == ".").strip(".")
        meant = f"{number}GiB" if number else example
        raise UsageError(error.message, hint=f"type: {with_value(option, meant)}") from None


def _check_policy(text: str, option: str, example: str) -> None:
    if "," in text:
        names = ",".join(names_in(text))
        one = f"type: {with_value(option, *(names_in(text)[:1] or [example]))}"
        several = f"mezzo compare takes several: --policies {names}; for one, {one}"
        if len(names_in(text)) < 2:
            several = one
        elif typed()[1:2] == ("run",):
            several = f"type: {with_value(option, names, command='compare', renamed='--policies')}"
        raise UsageError(f"{option} {text!r}; allowed: one policy", hint=several)
    _check_policies(text, option, example)


def _check_policies(text: str, option: str, example: str) -> None:
    names = text.rstrip(", ").split(",")  # the words after a comma and a space are where the script should be
    if not all(name.strip() for name in names):
        full = ",".join(names_in(text)) or example
        raise PolicyError(f"{option} {text!r} contains an empty policy name", hint=f"type: {with_value(option, full)}")
    if text.endswith(".py"):
        what = f"{option} took {text!r} as its value, so there is no script"
        raise UsageError(what, hint=f"type: {with_value(option, example)}")
    for place, name in enumerate(names):
        try:
            parse_policy(name)
        except PolicyError as error:
            near = _near_policy(name, several=option == "--policies")
            if near is None:
                raise
            meant = [*names[:place], near, *names[place + 1 :]] if near else names_in(example)
            compared = option == "--policies" and typed()[1:2] == ("compare",)
            line = with_value(option, with_baseline(meant) if compared else ",".join(meant))
            raise PolicyError(error.message, hint=f"type: {line}") from None


def with_baseline(names: Sequence[str]) -> str:
    """Return policies for a comparison: a single one has FP32 beside it, and FP32 has both 16-bit formats."""
    from mezzo.policy import canonical

    named = names_in(",".join(names))
    if len(named) > 1:
        return ",".join(named)
    return f"fp32,{named[0]}" if canonical(named[0]) != "fp32" else "fp32,bf16,fp16"


def _check_presets(text: str, option: str, example: str) -> None:
    from mezzo.policy import PRESETS, canonical

    _check_policies(text, option, example)
    others = [name for name in names_in(text) if canonical(name) not in PRESETS]
    if others:
        rest = ",".join(name for name in names_in(text) if name not in others) or example
        raise UsageError(
            f"{option} {text!r} has {others[0]!r}, which cannot be predicted; allowed: {', '.join(PRESETS)}",
            hint=f"type: {with_value(option, rest)}",
        )


def _near_policy(name: str, *, several: bool) -> str | None:
    """Return the policy that was probably meant, empty if there is none; None if the name is right and something else is wrong."""
    from mezzo.policy import POLICY_ALIASES, PRESETS, canonical

    preset, colon, fields = name.strip().partition(":")
    if preset in PRESETS or preset in POLICY_ALIASES or preset.endswith(".toml"):
        return None  # a field or a file is wrong
    parts = re.split(r"[;/|&+=\s]+", name.strip())
    if len(parts) > 1 and all(canonical(part) in PRESETS for part in parts):
        return ",".join(parts) if several else parts[0]
    near = get_close_matches(preset.lower(), [*PRESETS, *POLICY_ALIASES], n=1)
    return f"{near[0]}{colon}{fields}" if near else ""


def _check_judged(text: str, option: str, example: str) -> None:
    from mezzo.records import AS_IS

    if text.strip().lower() == AS_IS:
        raise PolicyError(
            f"{option} {text}; allowed: a policy to judge, not the script's own precision",
            hint=f"type: {with_value(option, example)}",
        )
    _check_policy(text, option, example)


def _check_plans(text: str, option: str, example: str) -> None:
    from mezzo.measure.checkpointing.wanted import NAMED, check_wanted

    for one in names_in(text) or [text]:
        try:
            check_wanted(one)
        except UsageError as error:
            near = get_close_matches(one, NAMED[1:], n=1)
            raise UsageError(error.message, hint=f"type: {with_value(option, *(near or ['full']))}") from None


def _check_model(text: str, option: str, example: str) -> None:
    library, _, name = text.partition(":")
    if library in MODEL_LIBRARIES and name:
        return
    if text.endswith(".py"):
        raise UsageError(
            f"{option} took {text!r} as its value; allowed: a script without {option}, or a model by name",
            hint=f"type: {without_option(option, text)}",
        )
    name = name or (example.partition(":")[2] if library in MODEL_LIBRARIES else library)
    where = (
        library
        if library in MODEL_LIBRARIES
        else MODEL_LIBRARIES[2]
        if re.search(r"/|bert|gpt|llama|\bt5", name)
        else MODEL_LIBRARIES[0]
    )
    raise UsageError(
        f"{option} {text!r} does not name a library and a model; allowed: {', '.join(f'{one}:NAME' for one in MODEL_LIBRARIES)}",
        hint=f"type: {with_value(option, f'{where}:{name}')}",
    )


def _choice(names: Sequence[str]) -> Callback:
    """Return the check of an option with a few values."""

    def check(text: str, option: str, example: str) -> None:
        if text not in names:
            near = get_close_matches(text.lower(), names, n=1)
            raise UsageError(
                f"{option} {text!r}; {nearest(text, names)}", hint=f"type: {with_value(option, *(near or [example]))}"
            )

    return _while_read(check)


def _gpus_check(*words: str, several: bool) -> Callback:
    def check(text: str, option: str, example: str) -> None:
        _check_gpus(text, option, example, words, several=several)

    return _while_read(check)


def _check_gpus(text: str, option: str, example: str, words: Sequence[str], *, several: bool) -> None:
    from mezzo.gpus import GPUS, find_gpu, gpu_named

    names = [name.strip() for name in text.rstrip(", ").split(",")]
    if len(names) > 1 and not several and all(map(find_gpu, names)):
        line = with_value(option, names[0])
        if typed()[1:2] == ("check",):
            line = with_value(option, ",".join(names), command="compare", renamed="--gpus")
        raise UsageError(f"{option} {text!r}; allowed: one GPU", hint=f"type: {line}")
    names = names if several else [text.strip()]
    if not all(names):
        full = ",".join(filter(None, names)) or example
        raise UsageError(
            f"{option} {text!r} contains an empty name; allowed: GPUs by name", hint=f"type: {with_value(option, full)}"
        )
    for place, name in enumerate(names):
        if find_gpu(name) is None and name.lower() not in words:
            by_number = {one.removeprefix("rtx-"): one for one in GPUS if one[4:5].isdigit()}
            near = get_close_matches(name.lower(), [*by_number, *GPUS, *words], n=1, cutoff=0.5) or [EXAMPLES["GPU"]]
            meant = [*names[:place], by_number.get(near[0], near[0]), *names[place + 1 :]]
            line = with_value(option, ",".join(meant))
            try:
                gpu_named(name, option=option)
            except UsageError as error:
                raise UsageError(error.message, hint=f"type: {line}") from None


def parse_policy(text: str) -> Policy | None:
    """Return the policy that an option names; None for ``as-is``, the script's own precision."""
    from mezzo.policy import PRESETS, Policy, canonical

    if canonical(text) not in PRESETS:
        from mezzo.records import AS_IS

        if text.strip().lower() == AS_IS:
            return None
    return Policy.of(text.strip())


def names_in(text: str) -> list[str]:
    """Return the names of a list that was typed with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


duration = _while_read(_check_duration)
size = _while_read(_check_size)
policy = _while_read(_check_policy)
judged_policy = _while_read(_check_judged)
policies = _while_read(_check_policies)
plans = _while_read(_check_plans)
model = _while_read(_check_model)
optimizer, shard = _choice(OPTIMIZER_NAMES), _choice(SHARDS)
presets = _while_read(_check_presets)
gpu = _gpus_check(several=False)
gpu_or_none = _gpus_check(NONE, several=False)
gpus_or_none = _gpus_check(NONE, several=True)
gpus_all_or_cpu = _gpus_check(ALL, CPU, several=True)


@dataclass(frozen=True)
class Budget:
    """A time limit, and how much of it is left."""

    seconds: float
    console: Console | None = None
    """Where to print; None for standard error. A console keeps the progress line below what is printed."""
    _began_s: float = field(default_factory=time.monotonic)

    @property
    def spent_s(self) -> float:
        """The seconds since the command began."""
        return time.monotonic() - self._began_s

    def say(self, text: str) -> None:
        """Print a message, with the time that has passed and the time that is left."""
        left = max(self.seconds - self.spent_s, 0.0)
        line = f"[{clock(self.spent_s)}, {clock(left)} left] {text}"
        if self.console is None:
            print(line, file=sys.stderr, flush=True)
        else:
            self.console.print(line, markup=False, soft_wrap=True)


_UNITS_S = {"s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smh])", re.IGNORECASE)
_UNIT_WORDS = ("s", "sec", "seconds", "m", "min", "minutes", "h", "hour", "hours", "d", "day", "days")
_NEARLY = re.compile(r"(\d+(?:\.\d+)?) *([smhd]?)", re.IGNORECASE)


def seconds_of(text: str, *, option: str, example: str) -> float:
    """Return the seconds in an option's value, such as ``90s``, ``10m`` or ``1h``.

    Raises:
        UsageError: the value is not a duration above 0.
    """
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _UNITS_S[match[2].lower()] if match else 0.0
    if seconds <= 0:
        unit = next((word for word in _words_after(option) if word.lower() in _UNIT_WORDS), "")
        meant = _meant(f"{text}{unit}", example)
        raise UsageError(
            f"{option} {text!r}; allowed: a time above 0 with its unit, such as 30s, 5m or 1h",
            hint=f"type: {with_value(option, meant, skipped=_UNIT_WORDS)}",
        )
    return seconds


def _words_after(option: str) -> tuple[str, ...]:
    """Return the word after an option's value, as typed; nothing if there is none."""
    words = typed()
    place = words.index(option) + 2 if option in words else len(words)
    return words[place : place + 1]


def _meant(text: str, example: str) -> str:
    """Return the duration that was probably meant; a bare number of 60 or more was in seconds, as in older versions."""
    found = _NEARLY.match(text.strip())
    if found is None or float(found[1]) == 0:
        return example
    unit = found[2].lower() or ("s" if float(found[1]) >= 60 or example.endswith("s") else "m")
    return f"{24 * int(float(found[1]))}h" if unit == "d" else f"{found[1]}{unit}"


def clock(seconds: float) -> str:
    """Return a duration as a clock shows it: ``9:56``, ``1:00:00``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
