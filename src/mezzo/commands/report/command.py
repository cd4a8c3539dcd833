"""``mezzo report``: existing records, as text and as pages; a folder as an index of all records below it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import chain, count
from pathlib import Path
from typing import Annotated

import typer

from mezzo.cli import options, results
from mezzo.cli.folders import check_folder
from mezzo.cli.shown_help import HelpPage
from mezzo.errors import UsageError

HELP = HelpPage(
    group="keep",
    says="show records, and write pages and an index of them",
    example="mezzo report runs/",
    shown=("--open", "--serve", "--port", "--out", "--export", "--log-to", "--json"),
)

_OF_VIEWS = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)
"""What a view may raise for a record that the schema allows."""
_INDEX = "index.html"


def report(
    records: Annotated[
        list[Path],
        typer.Argument(
            metavar="RECORD...",
            autocompletion=options.record,
            help="record.json files written by any command, or a folder such as runs/.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write each page there instead of next to its record.")
    ] = None,
    log_to: options.LogTo = None,
    export_to: Annotated[
        list[Path] | None,
        typer.Option(
            "--export",
            metavar="EXPORT",
            help="Also write the record for other programs: .xml is JUnit, .sarif code scanning, .md a table. May be repeated.",
        ),
    ] = None,
    as_json: options.Json = False,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the pages on this machine (127.0.0.1 only) until Ctrl-C.")
    ] = False,
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="Port for --serve; 0 for any free port.")
    ] = 0,
) -> None:
    """Show records in the terminal and write each as a self-contained HTML page; for a folder, write an index of all records in it."""
    folders = [path for path in records if path.is_dir() and not (path / "record.json").is_file()]
    if folders:
        _refuse_mixed(records, folders, out=out, log_to=log_to, export_to=export_to, as_json=as_json)
        if next(folders[0].rglob("record.json"), None) is None and _list_snapshots(folders[0], show=show, serve=serve):
            return
        page = _index(folders[0])
    else:
        page = _report(records, out=out, log_to=log_to, export_to=export_to or [], as_json=as_json)
    if serve:
        _serve(page, port=port, show=show)
    elif show:
        _open(page.resolve().as_uri())


def _list_snapshots(folder: Path, *, show: bool, serve: bool) -> bool:
    """Print what the snapshots in ``folder`` hold; return whether it has any."""
    from mezzo.engine.snapshots.folder import listing, snapshots_below

    if not snapshots_below(folder):
        return False
    if show or serve:
        raise UsageError(
            f"{'--serve' if serve else '--open'} shows pages, and {folder} has snapshots, which have none",
            hint=f"type: mezzo report {shlex.quote(str(folder))}",
        )
    with results.closed_output_ignored():
        for line in listing(folder):
            print(line)
    return True


def _refuse_mixed(
    records: Sequence[Path],
    folders: Sequence[Path],
    *,
    out: Path | None,
    log_to: Sequence[str] | None,
    export_to: Sequence[Path] | None,
    as_json: bool,
) -> None:
    folder = shlex.quote(str(folders[0]))
    if len(records) > 1:
        raise UsageError(
            f"{folders[0]} is a folder, and {len(records)} paths were given; allowed: one folder, or records",
            hint=f"type: mezzo report {folder}",
        )
    given = (("--out", out is not None), ("--log-to", bool(log_to)), ("--export", bool(export_to)), ("--json", as_json))
    for option, is_given in given:
        if is_given:
            raise UsageError(
                f"{option} goes with records, and {folders[0]} is a folder, whose index is written into it",
                hint=f"type: mezzo report {folder}",
            )


def _report(
    records: list[Path], *, out: Path | None, log_to: Sequence[str] | None, export_to: Sequence[Path], as_json: bool
) -> Path:
    """Show ``records`` and write their pages; return the page to open: the one with all comparisons, else the first."""
    from mezzo.commands.compare.page import page_together
    from mezzo.records import CompareRecord, read_record
    from mezzo.report.exports import check_export, export
    from mezzo.report.html import write_html, write_page
    from mezzo.report.terminal import render, render_page

    check_export(export_to, records=len(records))
    if as_json and len(records) > 1:
        raise UsageError(
            f"--json accepts one record; {len(records)} were given",
            hint=f"type: mezzo report --json {shlex.quote(str(records[0]))}, and the same for each of the others",
        )
    records = [path / "record.json" if path.is_dir() else path for path in records]
    for path in records:
        _check(path)
    check_folder(out, "--out")
    shown = list(zip(_pages(records, out), map(read_record, records), strict=True))
    for page, record in shown:
        write_html(record, page)
    for path in export_to:
        export(shown[0][1], path)
    compared = [record for _, record in shown if isinstance(record, CompareRecord)]
    folder = out or Path(os.path.commonpath([path.resolve().parent for path in records]))
    together = len(compared) > 1 and not as_json
    if together:
        write_page(page_together(compared), folder / "together.html")
    with results.closed_output_ignored():
        screen = results.console()
        for page, record in shown:
            if as_json:
                print(results.json_text(record))
                continue
            render(record, screen, files=f"report: {page}")
        if together:
            screen.print()
            render_page(page_together(compared), screen, verbose=False)
            screen.print(f"report: {folder / 'together.html'}", soft_wrap=True)
    for path, (page, record) in zip(records, shown, strict=True):
        results.track(record, path, page, log_to)
    return folder / "together.html" if together else shown[0][0]


def _index(folder: Path) -> Path:
    """Write the index of ``folder``, and every page that is missing or older than its record; return the path of the index."""
    from mezzo.errors import RecordError
    from mezzo.report import index
    from mezzo.report.html import write_html, write_index
    from mezzo.report.terminal import print_index

    paths = index.find_records(folder)
    if not paths:
        raise UsageError(
            f"there is no record.json in {folder} or below it",
            hint="pass the folder that mezzo commands write to, as in: mezzo report runs/",
        )
    check_folder(folder, "RECORD")
    entries, num_written = [], 0
    for path, record in index.read_all(paths):
        try:
            if not isinstance(record, RecordError) and index.outdated(path):
                write_html(record, index.page_of(path))
                num_written += 1
            entry = index.entry_of(path, record, folder)
        except _OF_VIEWS as error:  # it must not hide the others
            why = RecordError(
                f"{type(error).__name__}: {error}", hint="report this as a fault of Mezzo, with the record"
            )
            entry = index.entry_of(path, why, folder)
        entries.append(entry)
    sheet = index.index_sheet(entries, folder)
    write_index(sheet, folder / _INDEX)
    if num_written:
        results.note(f"{num_written} of {len(paths)} pages were missing or older than their records, and were written")
    with results.closed_output_ignored():
        screen = results.console()
        print_index(sheet, screen)
        screen.print(f"index: {folder / _INDEX}", soft_wrap=True)
    return folder / _INDEX


def _open(address: str) -> None:
    import webbrowser

    if not webbrowser.open(address):
        results.note(f"no browser could be started; open {address}")


def _serve(page: Path, *, port: int, show: bool) -> None:
    from mezzo.report.serve import address_of, serving

    folder = page.resolve().parent
    try:
        with serving(folder, port=port) as server:
            address = address_of(server) + ("" if page.name == _INDEX else page.name)
            print(f"serving {folder} at {address} (Ctrl-C to stop)", flush=True)
            if show:
                _open(address)
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                print()
    except OSError as error:
        raise UsageError(
            f"--port {port} cannot be used: {error.strerror}", hint="leave --port out to use any free port"
        ) from None


def _pages(records: list[Path], out: Path | None) -> list[Path]:
    """Return the path of each record's page: next to the record, or in ``out`` under the name of the record's folder."""
    from mezzo.report.index import page_of

    pages: list[Path] = []
    for path in records:
        if out is None:
            pages.append(page_of(path))
        else:
            name = path.resolve().parent.name
            names = chain([name], (f"{name}-{number}" for number in count(2)))
            pages.append(next(page for page in (out / f"{name}.html" for name in names) if page not in pages))
    return pages


def _check(path: Path) -> None:
    """Refuse a path that is not a file, and suggest the record that was probably meant."""
    if path.is_file():
        return
    nearby = [str(p) for folder in (path.parent, path.parent.parent) for p in sorted(folder.glob("*/record.json"))]
    near = get_close_matches(str(path), nearby, n=1)
    meant = near[0] if near else "runs/"
    hint = f"type: mezzo report {shlex.quote(meant)}"
    if not near and not any(Path("runs").glob("**/record.json")):
        hint = "type: mezzo run train.py, which writes a record and its page below runs/"
    raise UsageError(f"there is no record {str(path)!r}", hint=hint)
