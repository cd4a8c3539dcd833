"""Errors of the command line in two lines, like all of Mezzo's errors: what was typed, and what to type instead."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mezzo.cli.values import with_baseline
from mezzo.cli.vocabulary import COMMANDS, COUNTERPARTS, EXAMPLES, LIKELY, OTHER_NAMES
from mezzo.cli.words import typed, value_after, with_value
from mezzo.errors import UsageError, nearest
from mezzo.launch.targets import LAUNCHERS, before_mezzo

_NEAR = 0.7
"""How similar an option must be to what was typed for the corrected command to be suggested."""

_LISTS = ("--policies", "--gpus", "--seeds", "--at")
_OF_GPUS = ("--gpu", "--gpus")
_RECORD = "runs/demo/record.json"
_VERSION = ("-v", "-V", "-version", "--Version", "version")


def usage_error(error: Any, commands: Mapping[str, Any]) -> UsageError | None:
    """Return an error of the command-line parser as one of ours; None if the help was shown instead."""
    message = str(error.format_message()).strip().rstrip(".")
    context = getattr(error, "ctx", None)
    if not message:
        return None
    path = " ".join(typed()[:2]) if context is None else context.command_path
    hint = f"{path} --help-all lists its options"
    if context is not None and message.startswith("No such command"):
        return _unknown_command(context)
    if context is not None and hasattr(error, "possibilities"):
        return _unknown_option(error.option_name, context)
    if hasattr(error, "option_name") and typed()[1:2] and typed()[1] in commands:
        return UsageError(message, hint=f"type: {_with_or_without_value(error.option_name, commands[typed()[1]])}")
    if message.startswith("Missing argument"):
        return _missing_argument(message, path, commands)
    if path == "mezzo doctor" and not hasattr(error, "param"):
        return UsageError(message, hint="type: mezzo doctor")
    parameter = getattr(error, "param", None)
    option = next(iter(getattr(parameter, "opts", [])), "")
    if option.startswith("-"):
        reason = re.sub(r"^Invalid value for [^:]+: ", "", message)
        allowed = re.sub(r"^Input should be ([^,]*).*", r"allowed: \1", reason)
        message = f"{option} {value_after(option, typed()) or ''!r}; {allowed[:1].lower()}{allowed[1:]}"
        hint = f"type: {with_value(option, _example(parameter))}"
    return UsageError(message, hint=hint)


def _example(parameter: Any) -> str:
    """Return a value that an option allows."""
    default = getattr(parameter, "default", None)
    text = EXAMPLES.get(str(parameter.metavar), "VALUE") if default is None else str(default)
    return shlex.split(text)[0]


def _with_or_without_value(option: str, command: Any) -> str:
    """Return the command with an example for an option whose value is missing, or without the value of a flag."""
    words = list(typed())
    parameter = next(one for one in command.params if option in one.opts)
    place = next(n for n, word in enumerate(words) if word.partition("=")[0] == option)
    words[place : place + 1] = [option] if getattr(parameter, "is_flag", False) else [option, _example(parameter)]
    if words[-1] == _example(parameter):  # so the script is missing, too
        words += _script_if_any(command)
    return shlex.join(words)


def _script_if_any(command: Any) -> list[str]:
    return ["train.py"] if any(one.name == "target" for one in command.params) else []


def _missing_argument(message: str, path: str, commands: Mapping[str, Any]) -> UsageError:
    *before, last = typed()
    if before[2:] and before[-1].startswith("-") and last.endswith(".py"):
        what = f"{before[-1]} took {last!r} as its value, so there is no script"
        parameter = next(one for one in commands[before[1]].params if before[-1] in one.opts)
        return UsageError(what, hint=f"type: {shlex.join([*before, _example(parameter), last])}")
    example = _RECORD if path.endswith(" report") else "train" if last == "-m" else "train.py"
    return UsageError(message, hint=f"type: {shlex.join([*typed(), example])}")


def _unknown_command(context: Any) -> UsageError:
    words = list(typed())
    commands = list(context.command.commands)
    place = next((n for n, word in enumerate(words) if n and not word.startswith("-")), 0)
    name, rest = words[place], words[place + 1 :]
    near = get_close_matches(name.lower(), commands, n=1, cutoff=0.6)
    meant = next(iter(near), "") if name.lower() not in COMMANDS else COMMANDS[name.lower()]
    line = []
    if name == "help":
        line = ["mezzo", *rest[:1], "--help"]
    elif name in _VERSION:
        line = ["mezzo", "--version"]
    elif name.endswith((".py", ".ipynb")) or Path(name).is_file() or name.partition(" ")[0].endswith(".py"):
        line = [*words[:place], "run", *(shlex.split(name) if not Path(name).is_file() else [name]), *rest]
    elif name in LAUNCHERS:
        return before_mezzo(name, rest)
    elif name == "mezzo":
        line = [*words[:place], *rest] if rest else []
    elif meant:
        meant, *option = meant.split()
        script = (
            []
            if any(not word.startswith("-") and word.endswith(".py") for word in rest) or "-m" in rest
            else ["train.py"]
        )
        takes_script = bool(_script_if_any(context.command.commands[meant]))
        runs = ["runs"] if meant == "report" and not rest else []
        line = [*words[:place], meant, *option, *(script if takes_script else runs), *rest]
    hint = f"type: {shlex.join(line)}" if line else "mezzo --help describes each of them"
    return UsageError(f"mezzo has no command {name!r}; {nearest(name, commands)}", hint=hint)


def _unknown_option(name: str, context: Any) -> UsageError:
    options = [option for option in _options(context.command) if not option.startswith("--help") and option != "-h"]
    line = _before_a_command(name, context) if context.parent is None else _corrected(name, context)
    if line:
        hint = f"type: {shlex.join(line)}"
    elif context.parent is None:
        hint = "type: mezzo --help, or an option after a command: mezzo run --policy bf16 train.py"
    else:
        hint = f"{context.command_path} --help-all lists its options; the script's own options go after the script"
    return UsageError(f"{context.command_path} has no option {name}; allowed: {', '.join(options)}", hint=hint)


def _before_a_command(name: str, context: Any) -> list[str]:
    """Return the command for options that were typed before a command, or without one; empty if there is none."""
    words, commands = list(typed())[1:], context.command.commands
    if words[0] in _VERSION and len(words) == 1:
        return ["mezzo", "--version"]
    if words[:2] == ["-m", "mezzo"]:
        return ["mezzo", *words[2:]]
    place = next((n for n, word in enumerate(words) if word in commands), None)
    if place is not None:
        takes = any(word.partition("=")[0] in _options(commands[words[place]]) for word in words[:place])
        return ["mezzo", words[place], *(words[:place] if takes else []), *words[place + 1 :]]
    given = {word.partition("=")[0] for word in words if word.startswith("-")}
    fits = [command for command in LIKELY if name in _options(commands[command])]
    best = next((command for command in fits if given <= {*_options(commands[command])}), next(iter(fits), ""))
    has_script = any(word.endswith(".py") or Path(word).is_file() for word in words)
    scripts = [] if has_script or not best or "-m" in words else ["train.py"]
    return ["mezzo", best, *words, *scripts] if best else []


def _corrected(name: str, context: Any) -> list[str]:
    """Return the command with the option that was probably meant; empty if there is none."""
    words, command = list(typed()), context.command
    options = _options(command)
    place = next((n for n, word in enumerate(words) if word.partition("=")[0] == name), None)
    if place is None:  # the parser read -policy as -p and more, or -mq as two flags
        place = next((n for n, word in enumerate(words) if word.startswith("-") and f"-{word}" in options), None)
        return [] if place is None else [*words[:place], f"-{words[place]}", *words[place + 1 :]]
    value = value_after(name, words) or ""
    if value.isdigit() and name in ("--gpu", "--gpus", "--device", "--device-id"):
        rest = [*words[:place], *words[place + (1 if "=" in words[place] else 2) :]]
        several = name == "--gpus" and value != "0"
        before = (
            ["torchrun", "--nproc-per-node", value, "--no-python"] if several else [f"CUDA_VISIBLE_DEVICES={value}"]
        )
        return [*before, *rest]
    for meant in _meant(name, options):
        several = meant[0] == "--policies" and "," not in value and value != "" and len(meant) == 1
        if meant[0] != COUNTERPARTS.get(name) or meant[0] in _LISTS or "," not in value:
            new = (meant[0], with_baseline([value])) if several else meant
            return _replaced([*words, *_example_and_script(meant, words, place, command)], place, new, takes=several)
    others = _others(name, context)
    if others:
        has_script = _script_if_any(command) or any(word.endswith(".py") for word in words)
        scripts = [] if has_script else ["train.py"]
        if not _script_if_any(command) and name in _OF_GPUS:
            return [*_replaced(["mezzo", "predict", *words[2:]], place, ("--gpus",)), *scripts]
        if not _script_if_any(command) and _is_flag(name, context.parent.command.commands[others[0]]):
            return [*words[:place], *words[place + 1 :]]
        # check shares most options, and answers for a GPU that is not here
        other = min(others, key=lambda one: (one == "check") != (name == "--gpu"))
        return ["mezzo", other, *words[2:], *scripts]
    return _after_the_script(words, place, command)


def _is_flag(name: str, command: Any) -> bool:
    return any(name in one.opts and getattr(one, "is_flag", False) for one in command.params)


def _example_and_script(meant: tuple[str, ...], words: list[str], place: int, command: Any) -> list[str]:
    """Return what is missing after the last word: a value, and the script."""
    if place != len(words) - 1 or "=" in words[place]:
        return []
    parameter = next(one for one in command.params if meant[0] in one.opts)
    value = [] if len(meant) > 1 or getattr(parameter, "is_flag", False) else [_example(parameter)]
    return [*value, *_script_if_any(command)]


def _meant(name: str, options: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the options that a name may stand for, with a value if the name says it."""
    if COUNTERPARTS.get(name) in options:
        yield (COUNTERPARTS[name],)
    yield from (one for one in OTHER_NAMES.get(name.replace("_", "-"), ()) if one[0] in options)
    near = get_close_matches(name.strip("-").lower(), [one.strip("-") for one in options], n=1, cutoff=_NEAR)
    yield from ((one,) for one in options if near and one.strip("-") == near[0] and one != COUNTERPARTS.get(name))
    short = [one for one in options if re.fullmatch(r"-\w", name) and one.startswith(f"-{name}")]
    if len(short) == 1:
        yield (short[0],)


def _replaced(words: list[str], place: int, meant: tuple[str, ...], *, takes: bool = False) -> list[str]:
    """Return the command with another option; ``takes``: the value that was typed is part of ``meant``."""
    _, equals, value = words[place].partition("=")
    if equals:
        new = list(meant) if takes or len(meant) > 1 else [f"{meant[0]}={value}"]
        return [*words[:place], *new, *words[place + 1 :]]
    return [*words[:place], *meant, *words[place + (2 if takes else 1) :]]


def _others(name: str, context: Any) -> list[str]:
    """Return the other commands that have the option, and all others that were typed."""
    known = {name, *_options(context.command)}
    given = {name, *(word.partition("=")[0] for word in typed()[2:])} & known
    commands = context.parent.command.commands
    return [other for other, command in commands.items() if given <= {*_options(command)}]


def _after_the_script(words: list[str], place: int, command: Any) -> list[str]:
    """Return the command with an option of the script behind the script; empty if no word is a script."""
    script = next((n for n in range(place + 1, len(words)) if words[n].endswith(".py")), None)
    if script is None or not _script_if_any(command):
        return []
    own = {*_options(command)}
    last = next((n for n in range(place + 1, script) if words[n].partition("=")[0] in own), script)
    return [*words[:place], *words[last : script + 1], *words[place:last], *words[script + 1 :]]


def _options(command: Any) -> list[str]:
    return [option for parameter in command.params for option in parameter.opts if option.startswith("-")]
