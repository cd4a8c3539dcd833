"""Options that several commands share, with checks that run before anything else."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from mezzo.cli.first_word import check_first_word
from mezzo.cli.options import completion, values
from mezzo.cli.options.folders import check_folder
from mezzo.cli.words import RESUME, check_arguments, resume_folder, with_value
from mezzo.errors import UsageError

if TYPE_CHECKING:
    from mezzo.policy import Policy


Target: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="SCRIPT",
        autocompletion=completion.script,
        callback=check_first_word,
        help="The training script (with -m: the name of a module).",
    ),
]
Arguments: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ARGUMENTS]", callback=check_arguments, help="The script's own arguments."),
]
AsModule: TypeAlias = Annotated[bool, typer.Option("-m", help="Run SCRIPT as a module, as python -m does.")]
Metric: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="REGEX", help="Read a number from the script's output: the first group, as in 'acc=([0-9.]+)'."
    ),
]
Out: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder for record and report; if it contains another command's results, a new folder next to it is used. "
        "[default: a new folder under runs/]",
    ),
]

Budget: TypeAlias = Annotated[
    str,
    typer.Option(metavar="DURATION", callback=values.duration, help="Time for everything, such as 90s, 10m or 1h."),
]
Resume: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        RESUME,
        metavar="FOLDER",
        callback=resume_folder,
        help="Continue what was stopped in this folder: run only what is missing or failed there. Refused if the script, its "
        "arguments or a version changed.",
    ),
]


def _check_destinations(texts: list[str] | None) -> list[str] | None:
    if texts:
        from mezzo.report.tracking import destination

        for text in texts:
            to = destination(text, retyped=partial(with_value, "--log-to"))
            check_folder(Path(to.folder) if to.folder else None, "--log-to tensorboard:")
    return texts


LogTo: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--log-to",
        metavar="TRACKER",
        callback=_check_destinations,
        help="Also log the results to tensorboard, wandb or mlflow, or to a place there, such as tensorboard:FOLDER. May be repeated.",
    ),
]
Verbose: TypeAlias = Annotated[
    bool, typer.Option("--verbose", help="Also print the tables behind the answer, which the report has.")
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print the record as JSON on standard output.")]


PRESETS_HELP = "fp32, tf32, fp16, bf16, fp8; fp16-master and bf16-master keep FP32 master weights, fp16-pure and bf16-pure have none."
"""The presets, for the help of options that accept policies."""


Checkpoint: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="PLAN",
        callback=values.plans,
        help="Activation checkpointing of the script's models: full, every-2, selective, or the memory to keep for the backward pass, "
        "such as 12GiB.",
    ),
]


def policy_option(text: str, *, as_is: bool = True) -> Any:
    """Return the option of one policy with ``text`` as its help; ``as_is``: whether the script's own precision is one."""
    return typer.Option(
        metavar="POLICY",
        callback=values.policy if as_is else values.judged_policy,
        autocompletion=completion.policy,
        help=text,
    )


def policies_option(text: str) -> Any:
    """Return the option of several policies with ``text`` as its help."""
    return typer.Option(metavar="POLICIES", callback=values.policies, autocompletion=completion.policies, help=text)


MOST_OBSERVED_STEPS = 100_000
"""The most steps in one range to record or inspect: an observed step takes about a second, and every step number some memory."""
_LARGEST_SEED = 2**32 - 1
_METRIC = "acc=([0-9.]+)"


def typed_name(text: str, policy: Policy | None) -> str:
    """Return a policy as typed; empty if that is also the text that records have for it."""
    from mezzo.launch.request import policy_text

    name, colon, fields = text.strip().partition(":")
    return "" if f"{name.lower()}{colon}{fields}" == policy_text(policy) else text.strip()


def check_seed(seed: int | None) -> None:
    """Refuse a seed that NumPy would refuse."""
    if seed is not None and not 0 <= seed <= _LARGEST_SEED:
        raise UsageError(
            f"--seed {seed}; allowed: 0 to {_LARGEST_SEED}, the range that NumPy accepts",
            hint=f"type: {with_value('--seed', str(min(abs(seed), _LARGEST_SEED)))}",
        )


def check_metric(pattern: str | None) -> None:
    """Refuse a metric's pattern that is not a regular expression with a group."""
    if pattern is None:
        return
    example = f"as in --metric {_METRIC!r}"
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise UsageError(
            f"--metric {pattern!r} is not a regular expression: {error}",
            hint=f"escape literal brackets and dots with a backslash, and put the number in a group, {example}",
        ) from None
    if groups == 0:
        raise UsageError(f"--metric {pattern!r} has no group", hint=f"type: {with_value('--metric', _METRIC)}")
