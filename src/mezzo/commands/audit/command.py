"""``mezzo audit``: which operation ran in which format in chosen steps, and what is worth changing."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from mezzo.cli import options, values
from mezzo.cli.script import Script, observed_exit_code, run_and_finish
from mezzo.cli.shown_help import HelpPage
from mezzo.cli.words import with_value
from mezzo.errors import UsageError

HELP = HelpPage(
    group="understand",
    says="record what ran in which format, and what to change",
    example="mezzo audit --policy bf16 train.py",
    shown=("--policy", "--at", "--out", "--log-to", "--json", "-m"),
)


def audit(
    script: Script,
    policy: Annotated[
        str, options.policy_option("Precision policy to run the script under, or as-is for its own precision.")
    ] = "as-is",
    at: Annotated[
        str,
        typer.Option(
            metavar="STEPS", help="Training steps to record, from 1: 3, or 3,10, or 3-5. The script stops after them."
        ),
    ] = "3",
) -> None:
    """Record every operation of chosen training steps with its format, module and phase, and report findings.

    The script runs unedited. Under torchrun, srun or mpirun it runs in all processes, and one record has the findings of all.
    """
    from mezzo.launch.runner import observe_child
    from mezzo.observe.settings import AuditSettings

    parsed = values.parse_policy(policy)
    record, stop = run_and_finish(
        script,
        observe_child,
        policy=parsed,
        policy_typed=options.typed_name(policy, parsed),
        name="audit",
        observe=AuditSettings(steps=_numbers(at)),
    )
    raise typer.Exit(stop.exit_code or observed_exit_code(record))


def _numbers(at: str) -> tuple[int, ...]:
    """Return the steps named by a text such as ``3,10-12``, in ascending order."""
    numbers: set[int] = set()
    for part in at.split(","):
        match = re.fullmatch(r"\s*([1-9]\d*)\s*(?:-\s*([1-9]\d*)\s*)?", part)
        first, last = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
        if not 1 <= first <= last < first + options.MOST_OBSERVED_STEPS:
            raise UsageError(
                f"--at {at!r} is not a list of steps; allowed: numbers from 1, such as 3 or 3,10 or 3-5, "
                f"and ranges of at most {options.MOST_OBSERVED_STEPS:,} steps",
                hint=f"type: {with_value('--at', '3')}",
            )
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))
