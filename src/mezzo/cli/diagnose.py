"""``mezzo diagnose``: where a script's first value that is not finite comes from, and what to write against it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mezzo.cli import options, results
from mezzo.cli.folders import folder_of_rank


def diagnose(
    target: options.Target,
    arguments: options.Arguments = None,
    policy: Annotated[
        str, typer.Option(help="What to run the script under: a precision policy, or as-is (its own precision).")
    ] = "fp16",
    steps: Annotated[int, typer.Option(min=1, help="Training steps to watch at most.")] = 200,
    as_module: options.AsModule = False,
    out: options.Out = None,
    tensorboard: options.TensorBoard = None,
    as_json: options.Json = False,
) -> None:
    """Find the first value of a training script that leaves its format: module, operation, line, cause and a fix that was tried.

    The script runs unedited, and again where that is needed, to see the step in question and to try what may help: what
    it prints then goes to files beside the record. Exit code 0: nothing is wrong; 1: a fault was found; a script that
    fails by itself keeps its own.
    """
    from mezzo.launch.process.command_signals import stoppable
    from mezzo.launch.runner import several_runs
    from mezzo.launch.several.passes import diagnose_script

    text = options.policy_text(policy)
    options.check_script(target, arguments, as_module=as_module, policies=[text])
    folder = folder_of_rank(out, f"{Path(target).stem}-diagnose")
    request = options.request_for(target, arguments, as_module=as_module, policy=text, folder=folder, as_json=as_json)
    with stoppable() as stop, several_runs():
        record = diagnose_script(request, steps=steps)
        results.finish(record, folder, as_json=as_json, tensorboard=tensorboard, after_script=True)
    if stop.stopped:
        raise typer.Exit(stop.exit_code)
    if record.kind != "diagnose":
        raise typer.Exit(record.exit_code or 1)
    if record.verdict == "healthy":
        return
    raise typer.Exit((record.run.exit_code or 1) if record.verdict == "unfinished" else 1)
