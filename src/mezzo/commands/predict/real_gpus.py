"""Predictions for GPUs, shown next to measurements on a machine without them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from mezzo.cli import results
from mezzo.cli.options.values import NONE, names_in
from mezzo.cli.script import Script
from mezzo.commands.predict.traced import tracing
from mezzo.launch.signals import Stopped, stoppable

if TYPE_CHECKING:
    from mezzo.gpus import Gpu
    from mezzo.records import RealGpus, RunRecord

_USUAL = ("t4", "a100-80gb", "h100-sxm", "rtx-4090")
"""The GPUs to predict if none is named."""


def named_gpus(text: str | None) -> list[Gpu] | None:
    """Return the GPUs of ``--gpus``; None for the usual ones.

    Raises:
        UsageError: a GPU is unknown.
    """
    from mezzo.gpus import gpu_named

    if text is None:
        return None
    if text.lower() == NONE:
        return []
    gpus = [gpu_named(name, option="--gpus") for name in names_in(text)]
    return list({gpu.name: gpu for gpu in gpus}.values())


def predicted_for(
    script: Script,
    runs: Sequence[RunRecord],
    gpus: list[Gpu] | None,
    say: Callable[[str], None] = results.note,
    *,
    limit_s: float | None = None,
) -> RealGpus | None:
    """Return predictions for the policies of ``runs``; None if none were requested, a signal stopped it, or the runs were on a GPU.

    Args:
        script: the script of the runs.
        runs: the measured runs.
        gpus: the GPUs; None for the usual ones, if no run was on a GPU in its own formats.
        say: prints a line.
        limit_s: time after which tracing ends; None for no limit.
    """
    from mezzo.gpus import GPUS

    trained = [run for run in runs if len(run.steps) and run.error is None]
    measured = any(run.environment.device == "cuda" and not run.effective.emulated for run in trained)
    if not trained or gpus == [] or (gpus is None and measured):
        return None
    library = trained[0].library
    from mezzo.records import RealGpus

    if library != "torch":
        listed = [gpu.name for gpu in gpus or []]
        return RealGpus(gpus=listed, reason=f"trainings in {library} are not predicted")
    cards = gpus or [GPUS[name] for name in _USUAL]
    say(
        f"predicting a step on {', '.join(gpu.name for gpu in cards)}: tracing the script without computing its numbers"
    )
    arguments = [word.replace("{run}", "predict") for word in script.arguments or ()]
    policies = {run.policy_shown: run.policy for run in trained if not run.checkpoint}
    with stoppable() as stop, suppress(Stopped), stop.at_once(), tracing(script.target, as_module=script.as_module):
        from mezzo.measure.predict.real_gpus import (
            real_gpus,
        )  # imports torch, as the other process does at the same time

        predicted = real_gpus(script.target, arguments, policies, cards, as_module=script.as_module, limit_s=limit_s)
        return None if stop.stopped else predicted
    return None
