"""``--jobs`` and ``--on``: how many runs at once, and the cluster that they run on, with its options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from mezzo.cli import results
from mezzo.cli.words import with_value
from mezzo.errors import UsageError, nearest

if TYPE_CHECKING:
    from mezzo.launch.on_cluster import Cluster
    from mezzo.launch.side_by_side import Engine

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
    from mezzo.launch.on_cluster import OnCluster
    from mezzo.launch.ranks.leading import leader
    from mezzo.launch.side_by_side import SideBySide, one_after_another, slots

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
    from mezzo.launch.on_cluster import Ray, Slurm

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
