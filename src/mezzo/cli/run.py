"""``mezzo run``: a script under a policy."""

from __future__ import annotations

import sys
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
    as_json: options.Json = False,
) -> None:
    """Run a training script under a precision policy, the script unedited.

    Output, exit code and Ctrl-C pass through. The summary goes to standard error.
    """
    from mezzo.launch.request import AS_IS, Request
    from mezzo.launch.runner import check_target, run_child
    from mezzo.policy import Policy

    options.check_metric(metric)
    text = policy if policy == AS_IS else str(Policy.of(policy))
    check_target(target, module=as_module)
    folder = options.new_folder(out, f"{Path(target).stem}-{text}")
    request = Request(
        target=target,
        kind="module" if as_module else "script",
        arguments=tuple(arguments or ()),
        policy=text,
        seed=seed,
        metric=metric,
        record_path=str(folder / "record.json"),
        command=("mezzo", *sys.argv[1:]),
        output_to_stderr=as_json,
    )
    record = run_child(request)
    options.finish(record, folder, as_json=as_json, stderr=True)
    raise typer.Exit(record.exit_code)
