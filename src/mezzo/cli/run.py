"""``mezzo run``: a script under a policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mezzo.cli import options, results
from mezzo.cli.fitting import with_fits
from mezzo.cli.guarding import check_guard, guard_request
from mezzo.cli.model_changes import changes_of
from mezzo.cli.script import Script, run_and_finish
from mezzo.cli.snapshots import check_snapshots, snapshot_request

if TYPE_CHECKING:
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
    guard: Annotated[
        str | None,
        typer.Option(
            metavar="ACTION",
            help="When training goes wrong (skips, scale at its floor, spike, NaN, zero gradients): note, stop, or rewind[:TIMES] "
            "to a snapshot.  [default: note]",
        ),
    ] = None,
    channels_last: Annotated[
        bool, typer.Option("--channels-last", help="Store convolution weights and images channels-last.")
    ] = False,
    compiles: Annotated[
        bool, typer.Option("--compile", help="Compile every model with torch.compile at its first call.")
    ] = False,
    checkpoint: options.Checkpoint = None,
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
    check_guard(guard, snapshots=snapshot is not None or resume is not None)
    asked = options.asked_policy(policy)
    changes = changes_of(target, as_module, channels_last=channels_last, compiles=compiles, checkpoint=checkpoint or "")
    script = Script(target=target, arguments=arguments, as_module=as_module, out=out, log_to=log_to, as_json=as_json)
    record, stop = run_and_finish(
        script,
        lambda request: with_fits(_logged(run_child, log_to or (), request), script, policy),
        policy=asked,
        policy_typed=options.typed_name(policy, asked),
        name=policy,
        shows_progress=False,
        snapshots=lambda folder: snapshot_request(script, folder, snapshot, resume, policy=asked, seed=seed),
        guard=guard_request(script, guard, policy=policy),
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
