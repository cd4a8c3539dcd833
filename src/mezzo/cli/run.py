"""``mezzo run``: a script under a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mezzo.cli import options


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

    Output, exit code and Ctrl-C pass through. The summary goes to standard error.
    """
    from mezzo.launch.request import AS_IS
    from mezzo.launch.runner import check_target, run_child
    from mezzo.policy import Policy

    options.check_metric(metric)
    text = policy if policy == AS_IS else str(Policy.of(policy))
    check_target(target, module=as_module)
    folder = options.new_folder(out, f"{Path(target).stem}-{text}")
    request = options.request_for(
        target, arguments, as_module=as_module, policy=text, folder=folder, as_json=as_json, seed=seed, metric=metric
    )
    record = run_child(request)
    options.finish(record, folder, as_json=as_json, tensorboard=tensorboard, stderr=True)
    raise typer.Exit(record.exit_code)
