"""Options that several commands share, and what they all do with a record."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from mezzo.launch.request import Request
    from mezzo.records import AnyRecord

Target: TypeAlias = Annotated[
    str, typer.Argument(metavar="SCRIPT", help="The training script (with -m: a module's name).")
]
Arguments: TypeAlias = Annotated[
    list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's own arguments.")
]
AsModule: TypeAlias = Annotated[bool, typer.Option("-m", help="Run SCRIPT as a module, as python -m does.")]
Metric: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="REGEX", help="Take a number from the script's output: the first group, as in 'acc=([0-9.]+)'."
    ),
]
Out: TypeAlias = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where record and report go. [default: a new folder under runs/]")
]


def _check_tensorboard(folder: Path | None) -> Path | None:
    if folder is not None and importlib.util.find_spec("tensorboardX") is None:
        raise typer.BadParameter(
            "tensorboardX is not installed; pip install 'mezzo[tensorboard]', or leave the option out"
        )
    return folder


TensorBoard: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--tensorboard",
        metavar="DIR",
        callback=_check_tensorboard,
        help="Write the record for TensorBoard, too, into DIR.",
    ),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print the record as JSON on standard output.")]

WIDTH_WITHOUT_TERMINAL = 110


def console(*, stderr: bool = False) -> Console:
    """Return a console that does not squeeze tables when it writes to a pipe or a file."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else WIDTH_WITHOUT_TERMINAL
    return Console(stderr=stderr, width=width, highlight=False)


def new_folder(out: Path | None, name: str) -> Path:
    """Return the folder for records: ``out``, or a new one under runs/ with date and ``name`` in its name."""
    stamp = datetime.now().strftime("%Y-%m-%d-%H%M%S")
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-")[:60]
    folder = out or _unused(Path("runs") / f"{stamp}-{plain}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def folder_of_rank(out: Path | None, name: str) -> Path:
    """Return the folder for the records of this process of a distributed run: rank 0's, or one named after another rank."""
    rank = os.environ.get("RANK", "0")
    if rank == "0":
        return new_folder(out, name)
    return new_folder(None if out is None else out / f"rank{rank}", f"{name}-rank{rank}")


def _unused(folder: Path) -> Path:
    candidates = (folder.with_name(f"{folder.name}-{n}") for n in range(2, 10_000))
    return folder if not folder.exists() else next(c for c in candidates if not c.exists())


def request_for(
    target: str,
    arguments: list[str] | None,
    *,
    as_module: bool,
    policy: str,
    folder: Path,
    as_json: bool = False,
    **more: Any,
) -> Request:
    """Return what a child process is to run, its record in ``folder``."""
    from mezzo.launch.frameworks import framework_of
    from mezzo.launch.request import Request

    kind: Literal["script", "module"] = "module" if as_module else "script"
    return Request(
        target=target,
        kind=kind,
        framework=framework_of(target, kind=kind),
        arguments=tuple(arguments or ()),
        policy=policy,
        record_path=str(folder / "record.json"),
        command=("mezzo", *sys.argv[1:]),
        output_to_stderr=as_json,
        **more,
    )


def finish(record: AnyRecord, folder: Path, *, as_json: bool, tensorboard: Path | None, stderr: bool = False) -> None:
    """Write ``record.json`` and ``report.html``, TensorBoard's files where asked, and show the record as text or as JSON."""
    from mezzo.records import write_record
    from mezzo.report.html import write_html
    from mezzo.report.text import render

    write_record(record, folder / "record.json")
    write_html(record, folder / "report.html")
    if tensorboard is not None:
        from mezzo.report.tensorboard import write_events

        write_events(record, tensorboard)
    if as_json:
        print(record.model_dump_json(indent=1))
        return
    screen = console(stderr=stderr)
    render(record, screen)
    screen.print(f"record and report: {folder / 'record.json'}, {folder / 'report.html'}", soft_wrap=True)


def check_metric(pattern: str | None) -> None:
    """Refuse a metric's pattern that is no regular expression with a group."""
    if pattern is None:
        return
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise typer.BadParameter(f"{pattern!r} is not a regular expression: {error}", param_hint="--metric") from None
    if groups == 0:
        raise typer.BadParameter(
            f"{pattern!r} has no group; put the number in brackets: 'acc=([0-9.]+)'", param_hint="--metric"
        )
