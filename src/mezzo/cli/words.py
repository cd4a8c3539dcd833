"""The words of the command as typed: for records, and for the commands that errors suggest."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mezzo.cli.vocabulary import LIKELY
from mezzo.errors import UsageError
from mezzo.readable import readable
from mezzo.secrets import hidden

if TYPE_CHECKING:
    from mezzo.launch.targets import Target

TYPED_WORDS: ContextVar[tuple[str, ...]] = ContextVar("words", default=())
"""The words after ``mezzo``."""

_PARSERS_OF_LIBRARIES = re.compile(r"\b(?:HfArgumentParser|TrlParser|LightningCLI)\b")
"""Argument parsers that accept options which a script's own files do not name."""


def typed() -> tuple[str, ...]:
    """Return the whole command, with placeholders for the secrets in it: it is printed and recorded."""
    return ("mezzo", *map(readable, hidden(TYPED_WORDS.get())))


def target_of(name: str, arguments: Sequence[str] | None, *, module: bool) -> Target:
    """Return the script or module as typed, with the words before and after it."""
    from mezzo.launch.targets import Target

    script_arguments = tuple(arguments or ())
    words = typed()
    before = words[: max(len(words) - len(script_arguments) - 1, 1)]
    options = tuple(word for word in before if word != "-m")
    return Target(name, module=module, arguments=script_arguments, typed=options)


RESUME, _OUT = "--resume", "--out"


def typed_before(num_arguments: int) -> tuple[str, ...]:
    """Return the command that a resumed one continues: as typed, with ``--out`` for the ``--resume`` before the script."""
    words = typed()
    script = len(words) - num_arguments - 1
    folder = value_after(RESUME, words[:script])
    options = _without_option(words[2:script], RESUME)
    if folder is not None and value_after(_OUT, options) is None:
        options = [_OUT, folder, *options]
    return (*words[:2], *options, *words[script:])


def resuming(folder: Path, *, num_arguments: int) -> str:
    """Return the command that continues in ``folder``: as typed, with that folder."""
    words = typed()
    script = len(words) - num_arguments - 1
    options = _without_option(_without_option(words[2:script], RESUME), _OUT)
    return shlex.join([*words[:2], RESUME, str(folder), *options, *words[script:]])


def _without_option(words: Sequence[str], option: str) -> list[str]:
    """Return the words of options without one of them and its value."""
    for place, word in enumerate(words):
        if word == option or word.startswith(f"{option}="):
            return [*words[:place], *words[place + (1 if "=" in word else 2) :]]
    return list(words)


def resume_folder(folder: Path | None) -> Path | None:
    """Refuse the older ``--resume --out FOLDER``, and a script in the place of the folder.

    Raises:
        UsageError: it has the line to type.
    """
    words = list(typed())
    if folder is not None and str(folder).startswith("-"):
        out = value_after(_OUT, words) or "runs/mine"
        rest = _without_option([word for word in words if word != RESUME], _OUT)
        line = shlex.join([*rest[:2], RESUME, out, *rest[2:]])
        raise UsageError(f"{RESUME} without a folder; allowed: the folder to continue in", hint=f"type: {line}")
    if folder is not None and folder.suffix == ".py":
        place = words.index(RESUME) + 1 if RESUME in words else len(words)
        line = shlex.join(
            [*words[:place], value_after(_OUT, words) or "runs/mine", *_without_option(words[place:], _OUT)]
        )
        raise UsageError(f"{RESUME} took {str(folder)!r} as its folder", hint=f"type: {line}")
    return folder


def value_after(option: str, words: Sequence[str]) -> str | None:
    """Return the value of an option in a command's words; None without one."""
    for word, following in zip_longest(words, words[1:]):
        if word == option:
            return following
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None


def with_value(option: str, *values: str, command: str = "", renamed: str = "", skipped: Sequence[str] = ()) -> str:
    """Return the command as typed with ``values`` for an option that it has, to be typed again; only the option if it has none.

    A script that was taken as the option's value stays as the script.

    Args:
        option: the option as typed.
        values: the words to follow it.
        command: another command to use, in which the option is ``renamed``; empty for the typed one.
        renamed: the option of that command.
        skipped: words that are left out if they follow the value.
    """
    words, new = list(typed()), [renamed or option, *values]
    words[1:2] = [command] if command else words[1:2]
    for place, word in enumerate(words):
        if word == option or word.startswith(f"{option}="):
            after = words[place + (1 if "=" in word else 2) :]
            after = after[1:] if after and after[0].lower() in skipped else after
            script = [] if after or "=" in word else [one for one in words[place + 1 :] if one.endswith(".py")]
            return shlex.join([*words[:place], *new, *script, *after])
    return shlex.join(new)


def with_flag(flag: str) -> str:
    """Return the command as typed, with an option that takes no value."""
    words = [word for word in typed() if word != flag]
    return shlex.join([*words[:2], flag, *words[2:]])


def without_option(option: str, script: str) -> str:
    """Return the command as typed without an option and its value, which was the script."""
    rest = _without_option(typed(), option)
    return shlex.join([*rest, *([] if any(word.endswith(".py") for word in rest) else [script])])


LISTS = {"--policies": "policies", "--gpus": "GPUs"}
"""Options with several values, separated by commas."""


def repeated(option: str, *, times: int) -> UsageError:
    """Return the refusal of an option that was typed several times before the script, with its values in one, or the last."""
    words, values = list(typed()), list[str]()
    for _ in range(times):
        values.append(value_after(option, words) or "")
        words = _without_option(words, option)
    value = ",".join(values) if option in LISTS else values[-1]
    allowed = f"{LISTS[option]} separated by commas" if option in LISTS else "one value"
    line = shlex.join([*words[:2], option, value, *words[2:]])
    return UsageError(f"{option} was typed {times} times; allowed: {allowed}", hint=f"type: {line}")


def replacing(option: str, value: str, *, without: str = "") -> str:
    """Return the command as typed with ``value`` for an option that it may have had, and without another option that takes a value."""
    rest = _without_option(_without_option(typed(), option), without)
    return shlex.join([*rest[:2], option, value, *rest[2:]])


def check_arguments(context: typer.Context, arguments: list[str] | None) -> list[str] | None:
    """Refuse script arguments that are options of the command, unless the script mentions them or ``--`` comes before it.

    Raises:
        UsageError: it would be passed to a script that does not know it.
    """
    name, module = context.params.get("target"), bool(context.params.get("as_module"))
    misplaced = list(_own_options(context, arguments or []))
    if not misplaced or name is None or context.resilient_parsing:
        return arguments
    target = target_of(name, arguments, module=module)
    if "--" in target.typed:
        return arguments
    from mezzo.children.script_text import own_sources

    sources = list(own_sources(name, kind="module" if module else "script"))
    if not sources or any(_PARSERS_OF_LIBRARIES.search(source) for source in sources):
        return arguments
    unknown = [words for words in misplaced if not any(_mentions(source, words[0]) for source in sources)]
    if unknown:
        moved = [word for words in unknown for word in words]
        rest = _without(list(target.arguments), unknown)
        verb = _command_with({words[0].partition("=")[0] for words in unknown}, context)
        before = [*target.typed[:1], verb, *target.typed[2:], *moved]
        command = target._replace(typed=before, arguments=rest).instead(name, module=module)
        asis = target._replace(typed=[*target.typed, *(["-m"] if module else []), "--"]).instead(name)
        raise UsageError(
            f"{' '.join(moved)} comes after {name}, which does not mention it; allowed: options of Mezzo before the script",
            hint=f"type: {command}, or, if it is the script's own: {asis}",
        )
    return arguments


def _own_options(context: typer.Context, arguments: Sequence[str]) -> Iterator[list[str]]:
    """Yield every option of Mezzo's commands among the script's arguments, with its value."""
    commands = [command for _, command in _siblings(context)]
    flags = {name: bool(getattr(p, "is_flag", False)) for one in commands for p in one.params for name in p.opts}
    flags = {name: is_flag for name, is_flag in flags.items() if not name.startswith("--help")}
    for word, following in zip_longest(arguments, arguments[1:]):
        option = word.partition("=")[0]
        if option.startswith("--") and option in flags:
            alone = flags[option] or "=" in word or following is None
            yield [word] if alone else [word, str(following)]


def _siblings(context: typer.Context) -> list[tuple[str, Any]]:
    """Return the command of the context and the others on scripts, by name."""
    group = getattr(context.parent, "command", None)
    others: dict[str, Any] = getattr(group, "commands", {})
    on_scripts = [(name, others[name]) for name in LIKELY if name in others]
    return [(str(context.info_name), context.command), *on_scripts]


def _command_with(options: set[str], context: typer.Context) -> str:
    """Return the first command that has all options, the typed one if possible."""
    fits = (name for name, command in _siblings(context) if options <= {o for p in command.params for o in p.opts})
    return next(fits, str(context.info_name))


def _mentions(source: str, word: str) -> bool:
    name = word.partition("=")[0].removeprefix("--").replace("-", "[-_]")
    return re.search(rf"(?<![A-Za-z0-9]){name}(?![A-Za-z0-9])", source) is not None


def _without(words: list[str], parts: Sequence[list[str]]) -> list[str]:
    for part in parts:
        start = next(n for n in range(len(words)) if words[n : n + len(part)] == part)
        del words[start : start + len(part)]
    return words
