"""``mezzo run``: a script under a policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mezzo.cli import options, results
from mezzo.cli.script import Script, run_and_finish
from mezzo.cli.snapshots import check_snapshots, snapshot_request
from mezzo.errors import ScriptError

if TYPE_CHECKING:
    from mezzo.launch.model_changes import ModelChanges
    from mezzo.launch.request import Request
    from mezzo.records import RunRecord

SIGNALS = 128
"""Exit codes above this are of processes that a signal ended."""


def run(
    target: options.Target,
    arguments: options.Arguments = None,
    policy: Annotated[
        str,
        options.policy_option(f"Precision policy: a .toml file, as-is, or a preset: {options.PRESETS_HELP}"),
    ] = "fp16",
    as_module: options.AsModule = False,
    snapshot: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Save the script's state so often, between two batches: 30s, 5m, 1h."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Begin from the newest snapshot in the folder of an earlier run."),
    ] = None,
    channels_last: Annotated[
        bool, typer.Option("--channels-last", help="Store convolution weights and images channels-last.")
    ] = False,
    compiles: Annotated[
        bool, typer.Option("--compile", help="Compile every model with torch.compile at its first call.")
    ] = False,
    seed: Annotated[int | None, typer.Option(help="Add this to every seed that the script sets.")] = None,
    metric: options.Metric = None,
    out: options.Out = None,
    log_to: options.LogTo = None,
    as_json: options.Json = False,
) -> None:
    """Run an unedited training script under a precision policy.

    Output, exit code and signals pass through. The summary follows the script's output; with --json, the script's
    output goes to standard error. Under torchrun, srun or mpirun the script runs in all processes, and one record has
    the times, memory and skipped steps of each.
    """
    from mezzo.launch.runner import run_child

    options.check_metric(metric)
    options.check_seed(seed)
    check_snapshots(snapshot, resume)
    asked = options.asked_policy(policy)
    changes = _changes(target, as_module, channels_last=channels_last, compiles=compiles)
    script = Script(target=target, arguments=arguments, as_module=as_module, out=out, log_to=log_to, as_json=as_json)
    record, stop = run_and_finish(
        script,
        partial(_logged, run_child, log_to or ()),
        policy=asked,
        policy_typed=options.typed_name(policy, asked),
        name=policy,
        shows_progress=False,
        snapshots=lambda folder: snapshot_request(script, folder, snapshot, resume, policy=asked, seed=seed),
        seed=seed,
        metric=metric,
        models=changes,
    )
    results.note_metric(record)
    ended = stop.stopped and record.exit_code > SIGNALS  # otherwise the script ended itself
    raise typer.Exit(stop.exit_code if ended else record.exit_code)


def _logged(run: Callable[[Request], RunRecord], log_to: Sequence[str], request: Request) -> RunRecord:
    """Run a request, logged to trackers while it goes on."""
    from mezzo.cli.live_log import LiveLog
    from mezzo.launch.progress import shown_on

    with shown_on(LiveLog(log_to)) if log_to else nullcontext():
        return run(request)


def _changes(target: str, as_module: bool, *, channels_last: bool, compiles: bool) -> ModelChanges | None:
    """Return what to change in the script's models; None for nothing.

    Raises:
        ScriptError: such a script's models cannot be changed.
    """
    from mezzo.launch.frameworks import framework_of
    from mezzo.launch.model_changes import ModelChanges

    if not (channels_last or compiles):
        return None
    option = "--channels-last" if channels_last else "--compile"
    framework = framework_of(target, kind="module" if as_module else "script")
    if framework != "torch":
        raise ScriptError(
            f"{option} was given for a script in {framework}; allowed: PyTorch scripts",
            hint=f"leave {option} out",
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ScriptError(
            f"{option} was given in one of {os.environ['WORLD_SIZE']} processes; allowed: one process",
            hint="write it into the script, before its models are made parallel",
        )
    return ModelChanges(channels_last=channels_last, compiles=compiles)
