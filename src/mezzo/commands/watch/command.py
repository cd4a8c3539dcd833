"""``mezzo watch``: what holds a script back, while it runs and at the end."""

from __future__ import annotations

import typer

from mezzo.cli.progress import live_logging
from mezzo.cli.script import Script, run_and_finish
from mezzo.cli.shown_help import HelpPage
from mezzo.commands.run.command import SIGNALS

HELP = HelpPage(
    group="measure",
    says="say what holds the training back",
    example="mezzo watch train.py --epochs 3",
    shown=("--out", "--log-to", "--json", "-m"),
)


def watch(script: Script) -> None:
    """Find out what holds a training script back: input, waiting, communication, host, memory bandwidth, arithmetic or power.

    The script runs in its own precision. Standard error shows what it waits for while it runs; the summary names what
    holds it back and what to change.
    """
    from mezzo.launch.runner import run_child

    with live_logging(script.log_to):
        record, stop = run_and_finish(script, run_child, policy=None, name="watch", watches=True)
    raise typer.Exit(stop.exit_code if stop.stopped and record.exit_code > SIGNALS else record.exit_code)
