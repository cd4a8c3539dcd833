"""Options that several commands share, and what they all do with a record."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from mezzo.cli.folders import check_folder
from mezzo.cli.words import check_arguments, target_of, typed
from mezzo.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from mezzo.launch.request import Request
    from mezzo.records import AnyRecord, RunRecord

Target: TypeAlias = Annotated[
    str, typer.Argument(metavar="SCRIPT", help="The training script (with -m: a module's name).")
]
Arguments: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ARGS]...", callback=check_arguments, help="The script's own arguments."),
]
AsModule: TypeAlias = Annotated[bool, typer.Option("-m", help="Run SCRIPT as a module, as python -m does.")]
Metric: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="REGEX", help="Take a number from the script's output: the first group, as in 'acc=([0-9.]+)'."
    ),
]
Out: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Where record and report go; a folder beside it if it holds another command's. "
        "[default: a new folder under runs/]",
    ),
]


def _check_tensorboard(folder: Path | None) -> Path | None:
    if folder is not None and importlib.util.find_spec("tensorboardX") is None:
        raise UsageError(
            f"--tensorboard {folder}: tensorboardX is not installed",
            hint="pip install 'mezzo[tensorboard]', or leave the option out",
        )
    check_folder(folder, "--tensorboard")
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

WIDTH_WITHOUT_TERMINAL, _HEIGHT = 110, 25
_LARGEST_SEED = 2**32 - 1


def console(*, stderr: bool = False) -> Console:
    """Return a console as wide as COLUMNS says, or the terminal; in a pipe or a file wide enough for tables."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    columns = os.environ.get("COLUMNS", "")
    width = None if stream.isatty() else WIDTH_WITHOUT_TERMINAL
    if columns.isdecimal() and int(columns):
        width = int(columns)
    # A width without a height is not heeded where TERM is dumb.
    return Console(stderr=stderr, width=width, height=width and _HEIGHT, highlight=False)


def check_script(target: str, arguments: list[str] | None, *, as_module: bool) -> None:
    """Refuse what is no script or module; show an error in its syntax as python does."""
    from mezzo.launch.targets import check_target, show_syntax_error

    try:
        check_target(target_of(target, arguments, module=as_module))
    except SyntaxError as error:
        print(show_syntax_error(error), file=sys.stderr)
        raise typer.Exit(1) from None


def policy_text(policy: str) -> str:
    """Return a policy's canonical text, or ``as-is``."""
    from mezzo.launch.request import AS_IS
    from mezzo.policy import Policy

    return policy if policy == AS_IS else str(Policy.of(policy))


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
        command=typed(),
        output_to_stderr=as_json,
        **more,
    )


def finish(
    record: AnyRecord,
    folder: Path,
    *,
    as_json: bool,
    tensorboard: Path | None,
    after_script: bool = False,
) -> None:
    """Write ``record.json`` and ``report.html``, TensorBoard's files where asked, and print the record as text or as JSON.

    Args:
        record: what the command has learned.
        folder: where the files go.
        as_json: whether to print JSON.
        tensorboard: TensorBoard's folder.
        after_script: whether the script has printed to standard output before.
    """
    from mezzo.records import write_record
    from mezzo.report.html import write_html

    write_record(record, folder / "record.json")
    write_html(record, folder / "report.html")
    if tensorboard is not None:
        from mezzo.report.tensorboard import write_events

        write_events(record, tensorboard)
    try:
        _print(record, folder, as_json=as_json, after_script=after_script)
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        # Nobody reads any more, as behind "| head" or in a terminal that was closed; python would complain at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print(record: AnyRecord, folder: Path, *, as_json: bool, after_script: bool) -> None:
    from mezzo.report.text import render

    files = f"record and report: {folder / 'record.json'}, {folder / 'report.html'}"
    if as_json:
        print(record.model_dump_json(indent=1))
        print(f"mezzo: {files}", file=sys.stderr)
        return
    if after_script:
        print()  # it may have left its last line open
    screen = console()
    render(record, screen)
    screen.print(files, soft_wrap=True)


def note(text: str) -> None:
    """Say on standard error what is no result."""
    print(f"mezzo: {text}", file=sys.stderr)


def note_metric(record: RunRecord) -> None:
    """Say that a metric's pattern has matched nothing."""
    if record.metric is not None and not record.metric.values:
        note(f"--metric {record.metric.pattern!r} matched no number in what {record.script} printed")


def check_seed(seed: int | None) -> None:
    """Refuse a seed that NumPy would refuse."""
    if seed is not None and not 0 <= seed <= _LARGEST_SEED:
        raise UsageError(
            f"--seed {seed}; allowed: 0 to {_LARGEST_SEED}, as NumPy takes them",
            hint=f"type: --seed {min(abs(seed), _LARGEST_SEED)}",
        )


def check_metric(pattern: str | None) -> None:
    """Refuse a metric's pattern that is no regular expression with a group."""
    if pattern is None:
        return
    example = "as in --metric 'acc=([0-9.]+)'"
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise UsageError(
            f"--metric {pattern!r} is not a regular expression: {error}",
            hint=f"put a backslash before brackets and dots that stand for themselves, and the number in a group, {example}",
        ) from None
    if groups == 0:
        raise UsageError(f"--metric {pattern!r} has no group", hint=f"put the number in brackets, {example}")
