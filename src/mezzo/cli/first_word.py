"""The first word that is not an option, which should be the script: often it shows a mistake in the words before it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import typer

from mezzo.cli.values import with_baseline
from mezzo.cli.words import LISTS, typed
from mezzo.errors import UsageError

_OF_VALUES = ("--policies", "--policy", "--gpus", "--gpu")
_DASHES = ("\u2014", "\u2013", "\u2212", "\u2011")
"""What word processors and web pages make of two hyphens, or of one."""
_NOT_PYTHON = (
    *(".yaml", ".yml", ".json", ".jsonl", ".toml", ".cfg", ".ini", ".conf", ".txt", ".md", ".csv", ".log"),
    *(".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".npz", ".h5"),
)
"""Endings of files that a script reads: some of them are valid Python by accident."""


def check_first_word(context: typer.Context, name: str | None) -> str | None:
    """Refuse a word that cannot be the script, where the words before it say what was meant.

    Raises:
        UsageError: it has the line to type.
    """
    if name is None or context.resilient_parsing or context.params.get("as_module"):
        return name
    words = list(typed())
    place = next((n for n in range(2, len(words)) if words[n] == name), None)
    if place is None:
        return name
    if Path(name).is_file():
        if words[1:2] == ["diff"] and Path(name).suffix == ".json":
            return name
        _refuse_data(name, words[:place], words[place + 1 :])
        return name
    before, after = words[:place], words[place + 1 :]
    if name.startswith(_DASHES):
        line = [*before, f"--{name.lstrip(''.join(_DASHES))}", *after]
        raise _instead(f"{name!r} begins with a dash that is not a hyphen; allowed: --", line)
    if name == "-":
        raise _instead("'-' is standard input; allowed: a Python file", [*before, "train.py", *after])
    _refuse_values(name, before, after, context)
    _refuse_rest_of_vary(name, before, after)
    _refuse_rest_of_list(name, before, after)
    _refuse_command(name, before, after, context)
    _refuse_split_or_quoted(name, before, after)
    return name


def _refuse_data(name: str, before: Sequence[str], after: Sequence[str]) -> None:
    if Path(name).name == "record.json":
        raise _instead(f"{name} is not a script; allowed: the Python file that trains", ["mezzo", "report", name])
    if Path(name).suffix.lower() in _NOT_PYTHON:
        scripts = sorted(str(path) for path in Path().glob("*.py"))
        script = next((one for one in scripts if "train" in one), scripts[0] if scripts else "train.py")
        option = "--config" if Path(name).suffix.lower() in _NOT_PYTHON[:7] else "--file"
        line = shlex.join([*before, script, option, name, *after])
        raise UsageError(
            f"{name} is not a script; allowed: the Python file that reads it",
            hint=f"type: {line}, with the script's own name for {option}",
        )


def _refuse_values(name: str, before: Sequence[str], after: Sequence[str], context: typer.Context) -> None:
    """Refuse policies and GPUs that were typed without their option."""
    own = {option for parameter in context.command.params for option in parameter.opts}
    option = next((one for one in _OF_VALUES if one in own and _is_value(name, one)), "")
    if not option or before[-1].partition("=")[0] in _OF_VALUES or before[-2] in _OF_VALUES:
        return
    more, rest = [name], list(after)
    while rest and _is_value(rest[0], option):
        more.append(rest.pop(0))
    if option not in LISTS and len(more) > 1:
        before, option = ["mezzo", "compare", *before[2:]], _OF_VALUES[_OF_VALUES.index(option) - 1]
    joined = with_baseline(more) if before[1] == "compare" and option == "--policies" else ",".join(more)
    line = [*before, option, joined, *(rest or ["train.py"])]
    raise _instead(f"{' '.join(more)!r} is not a script; allowed: {option} before it", line)


def _refuse_rest_of_vary(name: str, before: Sequence[str], after: Sequence[str]) -> None:
    """Refuse values of an option of the script that are separated by spaces, with the script after them."""
    script = next((n for n, word in enumerate(after) if word.endswith(".py")), None)
    if before[-2] != "--vary" or "=" not in before[-1] or script is None:
        return
    joined = ",".join([before[-1], name, *after[:script]])
    typed_ = " ".join([before[-1], name, *after[:script]])
    raise _instead(f"--vary {typed_}; allowed: values separated by commas", [*before[:-1], joined, *after[script:]])


def _refuse_rest_of_list(name: str, before: Sequence[str], after: Sequence[str]) -> None:
    """Refuse values of a list that are separated by spaces, and several values where one is meant."""
    option, _, value = before[-2].partition("=") if len(before) > 3 and before[-2] in LISTS else ("", "", "")
    value = before[-1] if option else ""
    if before[-1].partition("=")[0] in LISTS and "=" in before[-1]:
        option, _, value = before[-1].partition("=")
    single = before[-2] if len(before) > 3 and before[-2] == "--policy" else ""
    if not (option and (_is_value(name, option) or value.endswith(","))) and not (single and _is_policy(name)):
        return
    more = [name]
    rest = list(after)
    while rest and _is_value(rest[0], option or "--policies"):
        more.append(rest.pop(0))
    rest = rest or ["train.py"]
    if single:
        line = ["mezzo", "compare", *before[2:-2], "--policies", ",".join([before[-1], *more]), *rest]
        raise _instead(f"--policy {before[-1]} {' '.join(more)}; allowed: one policy", line)
    start = before[:-1] if "=" in before[-1] else before[:-2]
    joined = ",".join(part for one in (value, *more) for part in one.split(",") if part)
    line = [*start, option, joined, *rest]
    raise _instead(f"{option} {' '.join([value, *more])}; allowed: {LISTS[option]} separated by commas", line)


def _refuse_command(name: str, before: Sequence[str], after: Sequence[str], context: typer.Context) -> None:
    parent = context.parent
    commands = getattr(parent.command, "commands", {}) if parent is not None else {}
    if name == "mezzo" and after:
        raise _instead("'mezzo' is not a script; allowed: the command once", ["mezzo", *after])
    if name in commands and after:
        line = ["mezzo", name, *before[2:], *after]
        raise _instead(f"{name!r} is a command, not a script; allowed: one command", line)


def _refuse_split_or_quoted(name: str, before: Sequence[str], after: Sequence[str]) -> None:
    """Refuse a script that was quoted together with its arguments, and a path with spaces that was not quoted."""
    try:
        parts = shlex.split(name)
    except ValueError:
        parts = []
    if len(parts) > 1 and (Path(parts[0]).is_file() or parts[0] in ("python", "python3")):
        parts = parts[1:] if parts[0].startswith("python") else parts
        raise _instead(
            f"there is no script {name!r}; allowed: its arguments as words of their own", [*before, *parts, *after]
        )
    for end in range(1, len(after) + 1):
        whole = " ".join([name, *after[:end]])
        if Path(whole).is_file():
            line = [*before, whole, *after[end:]]
            raise _instead(f"there is no script {name!r}; allowed: a path with spaces in quotes", line)


def _is_value(word: str, option: str) -> bool:
    from mezzo.gpus import find_gpu

    names = [part for part in word.split(",") if part]
    return bool(names) and all(find_gpu(one) is not None if "gpu" in option else _is_policy(one) for one in names)


def _is_policy(word: str) -> bool:
    from mezzo.policy import PRESETS, canonical

    return canonical(word.partition(":")[0]) in PRESETS


def _instead(message: str, line: Sequence[str]) -> UsageError:
    return UsageError(message, hint=f"type: {shlex.join(line)}")
