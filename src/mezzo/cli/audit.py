"""``mezzo audit``: which operation of chosen steps ran in which format, and what is worth changing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from mezzo.cli import options


def audit(
    target: options.Target,
    arguments: options.Arguments = None,
    policy: Annotated[
        str, typer.Option(help="What to run the script under: as-is (its own precision), or a precision policy.")
    ] = "as-is",
    steps: Annotated[
        str, typer.Option(help="Training steps to watch, from 1: 3, or 3,10, or 3-5; the script is ended after them.")
    ] = "3",
    as_module: options.AsModule = False,
    out: options.Out = None,
    tensorboard: options.TensorBoard = None,
    as_json: options.Json = False,
) -> None:
    """Watch chosen steps of a training script: every operation with its format, module and phase, and findings.

    The script runs unedited. In a distributed run (RANK is set) every process has a record of its own, those of other
    ranks in a folder rankN.
    """
    from mezzo.diagnosis.settings import AuditSettings
    from mezzo.launch.request import AS_IS
    from mezzo.launch.runner import check_target, diagnose_child
    from mezzo.policy import Policy

    text = policy if policy == AS_IS else str(Policy.of(policy))
    numbers = _numbers(steps)
    check_target(target, module=as_module)
    folder = options.folder_of_rank(out, f"{Path(target).stem}-audit")
    settings = AuditSettings(steps=numbers)
    request = options.request_for(
        target, arguments, as_module=as_module, policy=text, folder=folder, as_json=as_json, diagnosis=settings
    )
    record = diagnose_child(request)
    options.finish(record, folder, as_json=as_json, tensorboard=tensorboard, stderr=True)
    raise typer.Exit(record.run.exit_code if record.kind == "audit" else 1)


def _numbers(steps: str) -> tuple[int, ...]:
    """Return the steps that a text such as ``3,10-12`` names, ascending."""
    found: set[int] = set()
    for part in steps.split(","):
        match = re.fullmatch(r"\s*([1-9]\d*)\s*(?:-\s*([1-9]\d*)\s*)?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise typer.BadParameter(
                f"{steps!r} is no list of steps; write numbers from 1, as 3 or 3,10 or 3-5", param_hint="--steps"
            )
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(found))
