"""Errors of the command line in two lines, like all of Mezzo's errors: what was typed, and what to type instead."""

from __future__ import annotations

import re
import shlex
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mezzo.cli.words import typed, value_after
from mezzo.errors import UsageError, nearest

_NEAR = 0.7
"""How similar an option must be to what was typed for the corrected command to be suggested."""

_EXAMPLES = {"report": "runs/demo/record.json"}


def usage_error(error: Any) -> UsageError | None:
    """Return an error of the command-line parser as one of ours; None if the help was shown instead."""
    message = str(error.format_message()).strip().rstrip(".")
    context = getattr(error, "ctx", None)
    if not message:
        return None
    path = " ".join(typed()[:2]) if context is None else context.command_path
    hint = f"{path} --help lists its options"
    if context is not None and message.startswith("No such command"):
        return _unknown_command(context)
    if context is not None and hasattr(error, "possibilities"):
        return _unknown_option(error.option_name, context)
    if message.startswith("Missing argument"):
        return _missing_argument(message, path)
    option = next(iter(getattr(getattr(error, "param", None), "opts", [])), "")
    if option.startswith("-"):
        reason = re.sub(r"^Invalid value for [^:]+: ", "", message)
        allowed = re.sub(r"^Input should be ([^,]*).*", r"allowed: \1", reason)
        message = f"{option} {value_after(option, typed()) or ''!r}; {allowed[:1].lower()}{allowed[1:]}"
    return UsageError(message, hint=hint)


def _missing_argument(message: str, path: str) -> UsageError:
    *before, last = typed()
    if before[2:] and before[-1].startswith("-") and last.endswith(".py"):
        what = f"{before[-1]} took {last!r} as its value, so there is no script"
        return UsageError(what, hint=f"type: {shlex.join([*before, 'VALUE', last])}")
    example = _EXAMPLES.get(path.rpartition(" ")[2], "train" if last == "-m" else "train.py")
    return UsageError(message, hint=f"type: {shlex.join([*typed(), example])}")


def _unknown_command(context: Any) -> UsageError:
    words = list(typed())
    commands = list(context.command.commands)
    place = next((n for n, word in enumerate(words) if n and not word.startswith("-")), 0)
    name = words[place]
    near = get_close_matches(name, commands, n=1, cutoff=0.5)
    hint = "mezzo --help describes each of them"
    if name.endswith((".py", ".ipynb")) or Path(name).is_file():
        hint = f"type: {shlex.join([*words[:place], 'run', *words[place:]])}"
    elif near:
        hint = f"type: {shlex.join([*words[:place], near[0], *words[place + 1 :]])}"
    return UsageError(f"mezzo has no command {name!r}; {nearest(name, commands)}", hint=hint)


def _unknown_option(name: str, context: Any) -> UsageError:
    words = list(typed())
    options = _options(context.command)
    place = next((n for n, word in enumerate(words) if word.partition("=")[0] == name), None)  # None: -q of -mq
    given = {name, *(word.partition("=")[0] for word in words[2:])} & {name, *options}
    others = [other for other, command in context.parent.command.commands.items() if given <= {*_options(command)}]
    near = get_close_matches(name.strip("-"), [option.strip("-") for option in options], n=1, cutoff=_NEAR)
    hint = f"{context.command_path} --help lists its options; the script's own options go after the script"
    if others:
        other = min(others, key=lambda command: command == "check")  # last, since it shares options with several others
        hint = f"type: {shlex.join(['mezzo', other, *words[2:]])}"
    elif near and place is not None:
        option = next(option for option in options if option.strip("-") == near[0])
        hint = f"type: {shlex.join([*words[:place], option + words[place].removeprefix(name), *words[place + 1 :]])}"
    return UsageError(f"{context.command_path} has no option {name}; allowed: {', '.join(options)}", hint=hint)


def _options(command: Any) -> list[str]:
    return [option for parameter in command.params for option in parameter.opts if option.startswith("-")]
