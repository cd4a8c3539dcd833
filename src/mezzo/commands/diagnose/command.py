"""``mezzo diagnose``: where a script's first value that is not finite comes from, and how to fix it."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from mezzo.children.signals import stoppable
from mezzo.cli import options, results, values
from mezzo.cli.script import Script, run_and_finish
from mezzo.cli.shown_help import HelpPage

HELP = HelpPage(
    group="understand",
    says="find the first NaN or infinity, and why it appeared",
    example="mezzo diagnose --policy fp16 train.py",
    shown=("--policy", "--steps", "--out", "--log-to", "--json", "-m"),
)


def diagnose(
    script: Script,
    policy: Annotated[
        str, options.policy_option("Precision policy to run the script under, or as-is for its own precision.")
    ] = "fp16",
    steps: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, max=options.MOST_OBSERVED_STEPS, help="Maximum number of training steps to inspect."
        ),
    ] = 200,
) -> None:
    """Find the first value of a training script that leaves its format: module, operation, line, cause and a tested fix.

    The script runs unedited. It runs again where needed, to inspect the step in question and to test fixes; the output
    of these runs goes to files next to the record. Exit code 0: nothing is wrong; 1: a fault was found; a script that
    fails by itself keeps its own exit code.
    """
    from mezzo.commands.diagnose.plan import diagnose_script
    from mezzo.launch.runner import shared_imports

    parsed = values.parse_policy(policy)
    with stoppable(), shared_imports():
        record, stop = run_and_finish(
            script,
            partial(diagnose_script, steps=steps, note=results.note),
            policy=parsed,
            policy_typed=options.typed_name(policy, parsed),
            name="diagnose",
        )
    if stop.stopped:
        raise typer.Exit(stop.exit_code)
    if record.kind != "diagnose":
        raise typer.Exit(record.exit_code or 1)
    if record.verdict == "healthy":
        return
    raise typer.Exit((record.run.exit_code or 1) if record.verdict == "unfinished" else 1)
