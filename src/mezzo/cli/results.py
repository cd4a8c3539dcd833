"""The end of every command: it writes its record and report, prints results to standard output and notes to standard error."""

from __future__ import annotations

import errno
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from mezzo.records import AnyRecord, RunRecord

WIDTH_WITHOUT_TERMINAL, _HEIGHT = 110, 25


def console(*, stderr: bool = False) -> Console:
    """Return a console with the width of COLUMNS or the terminal; in a pipe or file, wide enough for tables."""
    from rich.console import Console
    from rich.segment import Segment

    from mezzo.report.formatting import without_controls

    class CleanConsole(Console):
        def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
            """Colours are apart from the texts, which come from records: what controls a terminal in them is shown, not sent."""
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else without_controls(text), style, control)

        def on_broken_pipe(self) -> None:  # rich would exit, with an exit code of its own
            raise BrokenPipeError(errno.EPIPE, "the reader is gone")

    stream = sys.stderr if stderr else sys.stdout
    columns = os.environ.get("COLUMNS", "")
    width = None if stream.isatty() else WIDTH_WITHOUT_TERMINAL
    if columns.isdecimal():
        width = int(columns) or WIDTH_WITHOUT_TERMINAL
    # rich ignores a width without a height if TERM is dumb.
    return CleanConsole(stderr=stderr, width=width, height=width and _HEIGHT, highlight=False)


@contextmanager
def closed_output_ignored() -> Iterator[None]:
    """Ignore that nobody reads the output any more, as after ``| head`` or in a closed terminal.

    Raises:
        OSError: standard output is a file on a full disk.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would complain at exit
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise OSError(error.errno, error.strerror, "standard output") from None


def finish(
    record: AnyRecord,
    folder: Path,
    *,
    as_json: bool,
    log_to: Sequence[str] | None,
    typed: str = "",
    after_script: bool = False,
    verbose: bool = True,
) -> None:
    """Write ``record.json`` and ``report.html``, print the record as text or as JSON, and log it to any trackers.

    Args:
        record: the result of the command.
        folder: the folder for the files.
        as_json: whether to print JSON.
        log_to: the trackers to log to, as typed.
        typed: the script, if the command is one on a script.
        after_script: whether the script has printed to standard output.
        verbose: whether to print the tables behind the answer too.
    """
    try:
        record = write(record, folder, typed=typed)
    except OSError:  # the results are shown even if the disk is full
        with closed_output_ignored():
            show(record, as_json=as_json, after_script=after_script, verbose=verbose)
        raise
    with closed_output_ignored():
        files = f"record and report: {folder / 'record.json'}, {folder / 'report.html'}"
        show(record, as_json=as_json, files=files, after_script=after_script, verbose=verbose)
    track(record, folder / "record.json", folder / "report.html", log_to)


def write(record: AnyRecord, folder: Path, *, typed: str = "") -> AnyRecord:
    """Write ``record.json`` and ``report.html``, and return the record as written; a page that cannot be written is only noted.

    Args:
        record: the result of the command.
        folder: the folder for the files.
        typed: the script of the command.

    Raises:
        OSError: the record cannot be written.
    """
    from mezzo.records import write_record
    from mezzo.report.html import write_html

    record = write_record(record, folder / "record.json")
    try:
        write_html(record, folder / "report.html", typed=typed)
    except OSError as error:
        again = shlex.join(["mezzo", "report", str(folder / "record.json")])
        note(f"cannot write {str(folder / 'report.html')!r}: {error.strerror}; to write it later, type: {again}")
    return record


def track(record: AnyRecord, path: Path, page: Path, log_to: Sequence[str] | None) -> None:
    """Log a record that is on disk; a tracker that fails is only noted, since the results are complete without it."""
    for text in log_to or ():
        from mezzo.report.tracking import TrackedRecord, destination, send

        try:
            where = send(record, TrackedRecord(record=path, page=page), destination(text))
        except Exception as error:  # from a library, its server or its disk
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            retry = shlex.join(["mezzo", "report", str(path), "--log-to", text])
            note(f"--log-to {text} failed ({reason}); to log the record again, type: {retry}")
        else:
            note(f"logged to {text.partition(':')[0]}: {where}")


def show(
    record: AnyRecord, *, as_json: bool, files: str = "", after_script: bool = False, verbose: bool = True
) -> None:
    """Print a record as text or as JSON, and the files that it was written to."""
    from mezzo.report.terminal import render

    if as_json:
        print(json_text(record))
        _note_hint(record)
        if files:
            note(files)
        return
    if after_script:
        print()  # the script may have left its last line open
    render(record, console(), files=files, verbose=verbose)


def json_text(record: AnyRecord) -> str:
    """Return a record as JSON in ASCII: what controls a terminal in it is escaped."""
    return json.dumps(json.loads(record.model_dump_json()), indent=1)


def note(text: str) -> None:
    """Print a note to standard error."""
    from mezzo.report.formatting import without_controls

    print(f"mezzo: {without_controls(text)}", file=sys.stderr)


def _note_hint(record: AnyRecord) -> None:
    """Note what to do about the error of a run, as the first hint says."""
    comparison = getattr(record, "comparison", None) or record
    single = getattr(record, "run", None) or getattr(record, "whole", None) or record
    runs: list[RunRecord] = getattr(comparison, "runs", None) or [single]
    if hint := next(filter(None, (getattr(run, "hint", "") for run in runs)), ""):
        note(hint)
