"""What the command line consists of: a table of the commands, a line each. Heavy imports happen inside a command."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, cast

import typer
from typer.main import get_command

from mezzo.children.signals import Stopped
from mezzo.cli.script import with_groups
from mezzo.cli.shown_help import HELP_FLAGS, PAGES, Commands, DocumentedCommand, HelpPage, ScriptCommand
from mezzo.cli.usage import usage_error
from mezzo.commands.audit import command as audit
from mezzo.commands.check import command as check
from mezzo.commands.compare import command as compare
from mezzo.commands.diagnose import command as diagnose
from mezzo.commands.diff import command as diff
from mezzo.commands.doctor import command as doctor
from mezzo.commands.fallback import command as fallback
from mezzo.commands.gate import command as gate
from mezzo.commands.predict import command as predict
from mezzo.commands.ranges import command as ranges
from mezzo.commands.report import command as report
from mezzo.commands.resume_check import command as resume_check
from mezzo.commands.run import command as run
from mezzo.commands.tune import command as tune
from mezzo.commands.watch import command as watch
from mezzo.errors import MezzoError
from mezzo.launch.ranks.launched import REASON
from mezzo.secrets import hidden_text, secrets_among
from mezzo.version import VERSION

app = typer.Typer(
    name="mezzo",
    help="Mixed-precision training that you can turn on, trust and prove, on your own unmodified script.",
    cls=Commands,
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": HELP_FLAGS},
)


def _add(
    name: str, command: Callable[..., None], page: HelpPage, *, cls: type[DocumentedCommand] = ScriptCommand
) -> None:
    """Add a command. On a script, parsing stops at the first word that is not an option: all words after the script are the script's."""
    PAGES[name] = page
    on_script: dict[str, Any] = {"allow_interspersed_args": False} if cls is ScriptCommand else {}
    app.command(name, cls=cls, context_settings={**on_script, "help_option_names": HELP_FLAGS})(command)


_add("doctor", doctor.doctor, doctor.HELP, cls=DocumentedCommand)
_add("check", with_groups(check.check, resumes=True), check.HELP)
_add("run", with_groups(run.run), run.HELP)
_add("compare", with_groups(compare.compare, resumes=True), compare.HELP)
_add("tune", with_groups(tune.tune, resumes=True), tune.HELP)
_add("watch", with_groups(watch.watch), watch.HELP)
_add("audit", with_groups(audit.audit), audit.HELP)
_add("diagnose", with_groups(diagnose.diagnose), diagnose.HELP)
_add("diff", with_groups(diff.diff), diff.HELP)
_add("ranges", with_groups(ranges.ranges), ranges.HELP)
_add("fallback", with_groups(fallback.fallback, resumes=True), fallback.HELP)
_add("predict", with_groups(predict.predict), predict.HELP)
_add("resume-check", with_groups(resume_check.resume_check), resume_check.HELP)
_add("gate", with_groups(gate.gate), gate.HELP)
_add("report", report.report, report.HELP, cls=DocumentedCommand)

_PARSER_ERROR = cast(type[Exception], typer.BadParameter.__mro__[2])
"""Base class of the parser's errors, which has no stable import: newer versions of typer contain a parser of their own."""


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"mezzo {VERSION}")
        raise typer.Exit


@app.callback()
def _mezzo(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def exit_code_of(words: list[str]) -> int:
    """Run the command in this process and return its exit code."""
    try:
        code = app(words, standalone_mode=False, prog_name="mezzo")
    except MezzoError as error:
        return failed(error)
    except _PARSER_ERROR as error:
        usage = usage_error(error, get_command(app).commands)  # type: ignore[attr-defined]
        return 2 if usage is None else failed(usage)
    except Stopped as stopped:
        print(f"mezzo: {stopped}", file=sys.stderr)
        return stopped.exit_code
    except OSError as error:
        return unusable(error)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    return code if isinstance(code, int) else 0


def unusable(error: OSError) -> int:
    """Print why a file cannot be used, such as a full disk, and return the exit code; raise any other error."""
    if error.filename is None and error.errno != errno.ENOSPC:
        raise error
    # Of a copy, the second name is the file that the disk has no space for.
    what = error.filename2 or error.filename or "standard output"
    REASON.tell(f"cannot use {what!r}: {error.strerror}")
    return 1


def failed(error: MezzoError) -> int:
    """Print an error in two lines, and return its exit code."""
    REASON.tell(hidden_text(str(error), values=secrets_among(sys.argv, os.environ).values()))
    return error.exit_code
