"""The command line: one small file a command, and the table of them. Heavy imports happen inside a command."""

from __future__ import annotations

import sys

import typer

from mezzo.cli import audit, compare, diagnose, doctor, fallback, ranges, report, run
from mezzo.errors import MezzoError

app = typer.Typer(
    name="mezzo",
    help="Mixed-precision training that you can turn on, trust and prove, on your own unmodified script.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# What follows a script belongs to the script: parsing stops at the first word that is no option.
_SCRIPT = {"allow_interspersed_args": False}

app.command("doctor")(doctor.doctor)
app.command("run", context_settings=_SCRIPT)(run.run)
app.command("compare", context_settings=_SCRIPT)(compare.compare)
app.command("audit", context_settings=_SCRIPT)(audit.audit)
app.command("diagnose", context_settings=_SCRIPT)(diagnose.diagnose)
app.command("ranges", context_settings=_SCRIPT)(ranges.ranges)
app.command("fallback", context_settings=_SCRIPT)(fallback.fallback)
app.command("report")(report.report)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: errors of ours are two lines on standard error, never a traceback."""
    try:
        code = app(arguments, standalone_mode=True)
    except MezzoError as error:
        print(f"mezzo: {error}", file=sys.stderr)
        return error.exit_code
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except KeyboardInterrupt:
        return 130
    return code if isinstance(code, int) else 0
