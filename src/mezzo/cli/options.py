"""Options that several commands share, what they refuse before anything runs, and what they ask of a child process."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from mezzo.cli.folders import check_folder
from mezzo.cli.standins import stand_in_for
from mezzo.cli.words import check_arguments, target_of, typed
from mezzo.errors import UsageError

if TYPE_CHECKING:
    from mezzo.launch.request import Request

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

_LARGEST_SEED = 2**32 - 1


def check_script(target: str, arguments: list[str] | None, *, as_module: bool, policies: Sequence[str]) -> None:
    """Refuse what is no script or module, or cannot run under a policy; show an error in its syntax as python does."""
    from mezzo.launch.targets import check_target, show_syntax_error

    wanted = target_of(target, arguments, module=as_module)
    try:
        check_target(wanted)
        for policy in policies:
            stand_in_for(wanted, policy=policy)
    except SyntaxError as error:
        print(show_syntax_error(error), file=sys.stderr)
        raise typer.Exit(1) from None


def policy_text(policy: str) -> str:
    """Return a policy's canonical text, or ``as-is``."""
    from mezzo.policy import Policy
    from mezzo.records import AS_IS

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
        stand_in=stand_in_for(target_of(target, arguments, module=as_module), policy=policy),
        arguments=tuple(arguments or ()),
        policy=policy,
        record_path=str(folder / "record.json"),
        command=typed(),
        output_to_stderr=as_json,
        **more,
    )


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
            hint=f"escape literal brackets and dots with a backslash, and put the number in a group, {example}",
        ) from None
    if groups == 0:
        raise UsageError(f"--metric {pattern!r} has no group", hint=f"put the number in brackets, {example}")
