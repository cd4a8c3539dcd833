"""``mezzo doctor``: the formats that this machine computes in."""

from __future__ import annotations

from mezzo.cli import options, results
from mezzo.cli.folders import new_folder
from mezzo.cli.shown_help import HelpPage
from mezzo.errors import UsageError

HELP = HelpPage(
    group="start",
    says="say which formats this machine computes in",
    example="mezzo doctor",
    shown=("--out", "--json"),
)


def doctor(out: options.Out = None, log_to: options.LogTo = None, as_json: options.Json = False) -> None:
    """Show which formats this machine computes in, why, and what to change."""
    from mezzo.measure.doctor import examine

    record = examine()
    try:
        folder = new_folder(out, "doctor")
    except UsageError as error:
        if out is not None or log_to:
            raise
        results.show(record, as_json=as_json)  # the answer does not need a file
        results.note(f"no record was written: {error.message}; --out FOLDER names another folder")
        return
    results.finish(record, folder, as_json=as_json, log_to=log_to)
