"""``mezzo ranges``: overflow and underflow of a script's values at every loss scale, in every format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mezzo.cli import options
from mezzo.cli.script import Script, observed_exit_code, run_and_finish
from mezzo.cli.shown_help import HelpPage

if TYPE_CHECKING:
    from mezzo.launch.request import Request
    from mezzo.records import AnyRecord

HELP = HelpPage(
    group="understand",
    says="count values by exponent, and find the window of loss scales",
    example="mezzo ranges --policy fp16 train.py",
    shown=("--policy", "--steps", "--out", "--log-to", "--json", "-m"),
)


def ranges(
    script: Script,
    policy: Annotated[
        str,
        options.policy_option(
            "Policy to judge: its formats, its initial loss scale and the modules that it keeps in FP32.",
            as_is=False,
        ),
    ] = "fp16",
    steps: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            max=options.MOST_OBSERVED_STEPS,
            help="Number of training steps to record. The script stops after them.",
        ),
    ] = 20,
) -> None:
    """Show the ranges of a training script's values, and what each format and loss scale would do to them.

    The script runs unedited, in FP32: weights, activations, gradients and updates are counted by exponent. Under torchrun,
    srun or mpirun one record has the values of all processes.
    """
    from mezzo.launch.runner import observe_child
    from mezzo.observe.settings import RangesSettings
    from mezzo.policy import Policy

    judged, fp32 = Policy.of(policy), Policy.parse("fp32")
    settings = RangesSettings(steps=tuple(range(1, steps + 1)), policy=judged)

    def run(request: Request) -> AnyRecord:
        record = observe_child(request)
        typed = options.typed_name(policy, judged)
        return record.model_copy(update={"policy_typed": typed}) if record.kind == "ranges" else record

    record, stop = run_and_finish(script, run, policy=fp32, name="ranges", observe=settings)
    raise typer.Exit(stop.exit_code or observed_exit_code(record))
