"""Help as plain text: an example first, then the options that most people need; ``--help-all`` adds the rest."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from typer.core import TyperCommand, TyperGroup

from mezzo.cli.words import repeated, typed

ALL = "--help-all"
HELP_FLAGS = ["-h", "--help", ALL]
_INDENT, _NARROWEST = 26, 60


class DocumentedCommand(TyperCommand):
    """A command with this help, whose options are typed once, if they do not take several values."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after the command's name.

        Raises:
            UsageError: an option stands there twice; the parser would silently take the last.
        """
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        for one in given:
            takes_one = one.param_type_name == "option" and not (one.multiple or getattr(one, "is_flag", False))
            if takes_one and given.count(one) > 1:
                raise repeated(one.opts[0], times=given.count(one))
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help of the command."""
        formatter.write(command_help(str(ctx.info_name), self, whole=ALL in typed()))


class ScriptCommand(DocumentedCommand):
    """A command on a script. The words after the script are the script's own, so the command's options are not completed there."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return the options that begin with ``incomplete``; none after the script, where the shell completes files."""
        return [] if ctx.params.get("target") else super().shell_complete(ctx, incomplete)


class Commands(TyperGroup):
    """All commands, in groups."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the questions, and the commands in their groups."""
        formatter.write(overview(self.help or ""))


def overview(about: str) -> str:
    """Return the questions that people come with, each with its command, and all commands in their groups."""
    lines = ["Usage: mezzo COMMAND [OPTIONS] SCRIPT [ARGUMENTS]", "", *_wrapped(about, 0), ""]
    lines += [line for question, *asked in QUESTIONS for line in (question, *(f"    {one}" for one in asked))]
    for group in GROUPS:
        lines += ["", group.capitalize()]
        lines += [line for name, page in PAGES.items() if page.group == group for line in _entry(name, page.says)]
    lines += ["", "mezzo COMMAND --help shows an example and the options; mezzo --version prints the version."]
    return "\n".join([*lines, "Exit codes: docs/exit-codes.md.", ""])


def command_help(name: str, command: Any, *, whole: bool) -> str:
    """Return the help of a command; ``whole`` adds its full description and its less used options."""
    page = PAGES[name]
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option"]
    shown = [one for name in page.shown for one in options if name in one.opts]
    rest = [one for one in options if one not in shown]
    usage = " ".join([f"Usage: mezzo {name} [OPTIONS]", *(str(one.metavar) for one in arguments)])
    lines = [usage, "", "Example:", f"    {page.example}", ""]
    about = re.split(r"\n\s*\n", (command.help or "").strip())
    for paragraph in about if whole else about[:1]:
        lines += [*_wrapped(paragraph, 0), ""]
    lines += ["Options:", *(line for one in shown for line in _option(one))]
    if whole and rest:
        lines += ["", "More options:", *(line for one in rest for line in _option(one))]
    elif rest or about[1:]:
        others = f"the other {len(rest)} options" if len(rest) > 1 else "the other option"
        more = f"{others} and " if rest else ""
        lines += ["", *_wrapped(f"{ALL} shows {more}the whole description.", 0)]
    return "\n".join([*lines, ""])


def _option(option: Any) -> Iterator[str]:
    words = ", ".join(option.opts) + (f" {option.metavar}" if option.metavar else "")
    default = option.default
    said = "[default:" in (option.help or "") or default in (None, False, "", [])
    text = (option.help or "") + ("" if said else f" [default: {default}]")
    yield from _entry(words, text)


def _entry(words: str, text: str) -> list[str]:
    lines = _wrapped(text, _INDENT)
    head = f"  {words}"
    if len(head) > _INDENT - 2:
        return [head, *lines]
    return [f"{head:{_INDENT}}{lines[0].strip()}", *lines[1:]]


def _wrapped(text: str, indent: int) -> list[str]:
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() and int(columns) else shutil.get_terminal_size((100, 0)).columns
    plain = " ".join(text.replace("``", "").split())
    space = " " * indent
    return textwrap.wrap(
        plain,
        max(min(width, 100), _NARROWEST),
        initial_indent=space,
        subsequent_indent=space,
        break_on_hyphens=False,
    )


QUESTIONS = (
    ("Is mixed precision on, and what do I gain?", "mezzo audit train.py", "mezzo check train.py"),
    ("Why is my loss NaN?", "mezzo diagnose train.py"),
    ("Which GPU, and how much memory?", "mezzo predict --gpus rtx-4090,a100-80gb train.py"),
    ("Will my training resume from its checkpoints?", "mezzo resume-check train.py"),
    ("What holds my training back?", "mezzo watch train.py"),
)
"""Each with the commands that answer it."""

GROUPS = ("start", "measure", "understand", "plan", "keep")
MOST_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class HelpPage:
    """The help of a command."""

    group: str
    says: str
    """What it does, in a line."""
    example: str
    shown: tuple[str, ...]
    """The options that ``--help`` shows; ``--help-all`` shows the others, too."""


PAGES: dict[str, HelpPage] = {}
"""By command, in the order of the overview; the parser adds each command's ``HELP``."""
