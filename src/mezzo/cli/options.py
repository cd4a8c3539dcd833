"""Options that several commands share, with checks that run before anything else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from mezzo.cli import results, values
from mezzo.cli.first_word import check_first_word
from mezzo.cli.folders import check_folder
from mezzo.cli.words import RESUME, check_arguments, resume_folder, with_value
from mezzo.errors import UsageError, nearest

if TYPE_CHECKING:
    from mezzo.policy import Policy
    from mezzo.studies.on_cluster import Cluster
    from mezzo.studies.side_by_side import Engine


def policy(incomplete: str) -> list[str]:
    """Return the policies that begin with ``incomplete``: presets, other libraries' names for them, policy files."""
    from mezzo.policy import POLICY_ALIASES, PRESETS
    from mezzo.records import AS_IS

    names = [name for name in (*PRESETS, *POLICY_ALIASES, AS_IS) if name.startswith(incomplete)]
    return [*names, *_files(incomplete, ".toml")]


def policies(incomplete: str) -> list[str]:
    """Return the list of policies typed before the last comma, once for each policy that completes the last one."""
    before, comma, last = incomplete.rpartition(",")
    listed = before.split(",")
    return [before + comma + name for name in policy(last) if name not in listed]


def verdicts(incomplete: str) -> list[str]:
    """Return the list of verdicts typed before the last comma, once for each verdict that completes the last one."""
    from mezzo.records import FAILING, NOT_EQUIVALENT

    before, comma, last = incomplete.rpartition(",")
    names = [*FAILING, NOT_EQUIVALENT, *(["none"] if not comma else [])]
    return [before + comma + name for name in names if name.startswith(last) and name not in before.split(",")]


def script(incomplete: str) -> list[str]:
    """Return the Python files and folders whose path begins with ``incomplete``."""
    return [*_files(incomplete, ".py")]


def record(incomplete: str) -> list[str]:
    """Return the records and folders whose path begins with ``incomplete``."""
    return [*_files(incomplete, ".json")]


def _files(incomplete: str, suffix: str) -> Iterator[str]:
    folder, slash, start = incomplete.rpartition("/")
    hidden = start.startswith(".")
    try:
        found = sorted(Path(folder + slash or ".").iterdir())
    except OSError:
        return
    for path in found:
        if path.name.startswith(start) and (hidden or not path.name.startswith((".", "__"))):
            if path.is_dir():
                yield f"{folder}{slash}{path.name}/"
            elif path.suffix == suffix:
                yield f"{folder}{slash}{path.name}"


TargetArgument: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="SCRIPT",
        autocompletion=script,
        callback=check_first_word,
        help="The training script (with -m: the name of a module).",
    ),
]
Arguments: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ARGUMENTS]", callback=check_arguments, help="The script's own arguments."),
]
AsModule: TypeAlias = Annotated[bool, typer.Option("-m", help="Run SCRIPT as a module, as python -m does.")]
MetricOption: TypeAlias = Annotated[
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

BudgetOption: TypeAlias = Annotated[
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


PRESETS_HELP = (
    "fp32, tf32, fp16, bf16, fp8; in blocks fp8-block, mxfp8, mxfp4, nvfp4; fp16-master and bf16-master keep FP32 master weights, "
    "fp16-pure and bf16-pure have none."
)
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
        autocompletion=policy,
        help=text,
    )


def policies_option(text: str) -> Any:
    """Return the option of several policies with ``text`` as its help."""
    return typer.Option(metavar="POLICIES", callback=values.policies, autocompletion=policies, help=text)


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


Jobs: TypeAlias = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Number of runs at once, each with a GPU of its own or, on a machine without GPUs, its share of the threads. "
        "[default: 1; with --on, as many as the cluster allows]",
    ),
]
On: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="CLUSTER",
        help="Run on a cluster that shares the folder: slurm (through submitit) or ray, with options, such as "
        "slurm:partition=gpu,gres=gpu:1,time=02:00:00 or ray:num_gpus=1. At most --jobs runs at once.",
    ),
]
_LIBRARIES = {"slurm": "submitit", "ray": "ray"}


def engine_of(jobs: int | None, on: str | None) -> Engine:
    """Return the engine that executes the runs.

    Raises:
        UsageError: this machine cannot execute so many runs at once, or the cluster cannot be used.
    """
    from mezzo.launch.ranks.leading import leader
    from mezzo.studies.on_cluster import OnCluster
    from mezzo.studies.side_by_side import SideBySide, one_after_another, slots

    if on is None and (jobs or 1) == 1:
        return one_after_another
    if leader() is not None:
        option = f"--jobs {jobs}" if on is None else f"--on {on}"
        raise UsageError(
            f"{option} under a launcher of several processes; allowed: neither --jobs nor --on",
            hint=f"leave out {option}: each run uses all processes of the launcher",
        )
    if on is not None:
        return OnCluster(named_cluster(on), jobs=jobs, note=results.note)
    return SideBySide(slots(jobs or 1))


def named_cluster(text: str) -> Cluster:
    """Return the cluster of ``--on``.

    Raises:
        UsageError: it is unknown, an option is not valid, or its library or Slurm is missing.
    """
    from mezzo.studies.on_cluster import Ray, Slurm

    name, _, rest = text.partition(":")
    if name not in _LIBRARIES:
        near = min(_LIBRARIES, key=lambda one: one[0] != name[:1])
        raise UsageError(
            f"--on {text!r}; {nearest(name, list(_LIBRARIES))}",
            hint=f"type: {with_value('--on', near)}",
        )
    options = _options(text, rest)
    try:
        return Slurm(options) if name == "slurm" else Ray(options)
    except ModuleNotFoundError as error:
        if error.name != _LIBRARIES[name]:
            raise
        raise UsageError(
            f"--on {name} needs {_LIBRARIES[name]}, which is not installed", hint=f"pip install {_LIBRARIES[name]}"
        ) from None


def _options(text: str, rest: str) -> dict[str, str]:
    options = {}
    for part in filter(None, rest.split(",")):
        name, equals, value = part.partition("=")
        if not (name.strip() and equals and value.strip()):
            raise UsageError(
                f"--on {text!r} contains {part!r}; allowed: options as name=value, separated by commas",
                hint="type: --on slurm:partition=gpu,time=02:00:00",
            )
        options[name.strip()] = value.strip()
    return options
