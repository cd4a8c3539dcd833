"""``mezzo run``: a script under a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mezzo.cli import options, results
from mezzo.cli.folders import folder_of_rank

_SIGNALS = 128
"""Above this are exit codes of what a signal has ended."""


def run(
    target: options.Target,
    arguments: options.Arguments = None,
    policy: Annotated[
        str, typer.Option(help="Precision policy: a name such as fp16, bf16, fp16-master, O2, a .toml file, or as-is.")
    ] = "fp16",
    as_module: options.AsModule = False,
    seed: Annotated[int | None, typer.Option(help="Add this to every seed that the script sets.")] = None,
    metric: options.Metric = None,
    out: options.Out = None,
    tensorboard: options.TensorBoard = None,
    as_json: options.Json = False,
) -> None:
    """Run a training script under a precision policy, the script unedited.

    Output, exit code and signals pass through. The summary follows the script's output; with --json the script's
    output goes to standard error. In a distributed run (RANK is set) every process has a record of its own, those of
    other ranks in a folder rankN.
    """
    from mezzo.launch.process.command_signals import stoppable
    from mezzo.launch.runner import run_child

    options.check_metric(metric)
    options.check_seed(seed)
    text = options.policy_text(policy)
    options.check_script(target, arguments, as_module=as_module, policies=[text])
    folder = folder_of_rank(out, f"{Path(target).stem}-{text}")
    request = options.request_for(
        target, arguments, as_module=as_module, policy=text, folder=folder, as_json=as_json, seed=seed, metric=metric
    )
    with stoppable() as stop:
        record = run_child(request)
        results.finish(record, folder, as_json=as_json, tensorboard=tensorboard, after_script=True)
        results.note_metric(record)
    ended = stop.stopped and record.exit_code > _SIGNALS  # otherwise the script has made its own end of it
    raise typer.Exit(stop.exit_code if ended else record.exit_code)
