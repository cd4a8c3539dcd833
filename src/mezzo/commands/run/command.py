"""``mezzo run``: a script under a policy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mezzo.cli import results
from mezzo.cli.help.shown import HelpPage
from mezzo.cli.live_log import live_logging
from mezzo.cli.options import shared as options
from mezzo.cli.options import values
from mezzo.cli.options.guarding import check_guard, guard_request
from mezzo.cli.options.model_changes import changes_of
from mezzo.cli.options.snapshots import check_snapshots, snapshot_request
from mezzo.cli.script import Script, run_and_finish
from mezzo.commands.predict.traced import with_fits

if TYPE_CHECKING:
    from mezzo.launch.request import Request
    from mezzo.records import RunRecord

HELP = HelpPage(
    group="start",
    says="run the script under a policy",
    example="mezzo run --policy bf16 train.py --epochs 3",
    shown=("--policy", "--snapshot", "--resume", "--guard", "--metric", "--seed", "--out", "-m"),
)

SIGNALS = 128
"""Exit codes above this are of processes that a signal ended."""


def run(
    script: Script,
    policy: Annotated[
        str,
        options.policy_option(f"Precision policy: a .toml file, as-is, or a preset: {options.PRESETS_HELP}"),
    ] = "fp16",
    snapshot: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            callback=values.duration,
            help="Save the script's state at this interval, between two batches: 30s, 5m, 1h.",
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Start from the newest snapshot of an earlier run, given its folder."),
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
    seed: Annotated[int | None, typer.Option(metavar="N", help="Add this to every seed that the script sets.")] = None,
    metric: options.Metric = None,
) -> None:
    """Run an unedited training script under a precision policy.

    Output, exit code and signals pass through. The summary follows the script's output; with --json, the script's
    output goes to standard error. Under torchrun, srun or mpirun the script runs in all processes, and one record has
    the times, memory and skipped steps of each.
    """
    from mezzo.launch.runner import run_child

    options.check_metric(metric)
    options.check_seed(seed)
    check_snapshots(snapshot, resume, out=script.out)
    check_guard(guard, snapshots=snapshot is not None or resume is not None)
    parsed = values.parse_policy(policy)
    changes = changes_of(script, channels_last=channels_last, compiles=compiles, checkpoint=checkpoint or "")

    def logged_run(request: Request) -> RunRecord:
        with live_logging(script.log_to):
            record = run_child(request)
        return with_fits(record, script, policy)

    record, stop = run_and_finish(
        script,
        logged_run,
        policy=parsed,
        policy_typed=options.typed_name(policy, parsed),
        name=policy,
        shows_progress=False,
        snapshots=lambda folder: snapshot_request(script, folder, snapshot, resume, policy=parsed, seed=seed),
        guard=guard_request(script, guard, policy=policy),
        seed=seed,
        metric=metric,
        models=changes,
    )
    if record.metric is not None and not record.metric.values:
        results.note(f"--metric {record.metric.pattern!r} matched nothing in the output of {record.script}")
    killed = stop.stopped and record.exit_code > SIGNALS  # otherwise the script handled the signal and ended by itself
    raise typer.Exit(stop.exit_code if killed else record.exit_code)
