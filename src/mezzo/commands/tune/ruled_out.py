"""The configurations of ``mezzo tune`` that predictions rule out before the first run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mezzo.children.signals import stoppable
from mezzo.cli.script import Script
from mezzo.cli.values import NONE, Budget
from mezzo.commands.predict.traced import tracing

if TYPE_CHECKING:
    from mezzo.commands.tune.forecast import Forecast
    from mezzo.commands.tune.plan import Configuration
    from mezzo.devices import Device
    from mezzo.gpus import Gpu
    from mezzo.records import Note

_SHARE = 0.2
"""The largest share of the budget that predictions may take."""


@dataclass(frozen=True, kw_only=True)
class RuledOut:
    """Configurations that are ruled out, and what was predicted."""

    reasons: dict[Configuration, str] = field(default_factory=dict)
    """The reason why each of these configurations is not run."""
    notes: list[Note] = field(default_factory=list)
    found: Mapping[Configuration, Forecast] = field(default_factory=dict)
    """All predictions."""
    gpu: str = ""
    """The GPU that they are for; empty for a CPU."""


def gpu_of(option: Gpu | str | None, here: Device) -> Gpu | str | None:
    """Return the GPU of ``--gpu``, without it the GPU of the runs; None for a CPU; a text if nothing is predicted, with the reason."""
    from mezzo.gpus import find_gpu

    if option is not None:
        return f"--gpu {NONE}" if isinstance(option, str) else option
    if here.kind == "cpu":
        return None
    return find_gpu(here.name) or f"{here.name} is not in the predictor's table"


def rule_out(
    script: Script, configurations: list[Configuration], gpu: Gpu | str | None, limit_bytes: int | None, budget: Budget
) -> RuledOut:
    """Return the configurations that are predicted not to fit, or to be much slower on a GPU; ``limit_bytes`` is the value of ``--memory``.

    On a CPU the time of scripts is not predicted, so without a limit there is nothing to predict.
    """
    from mezzo.records import Note

    if isinstance(gpu, str):
        return RuledOut(notes=[Note(what="predictions", value="none", reason=gpu)])
    if gpu is None and limit_bytes is None:
        why = "the time of scripts is predicted for GPUs only, and there is no --memory to limit this CPU"
        return RuledOut(notes=[Note(what="predictions", value="none", reason=why)])
    where = "this CPU" if gpu is None else gpu.label
    budget.say(f"predicting what fits on {where}" + ("" if gpu is None else ", and how fast it is"))
    end_s = budget.spent_s + _SHARE * budget.seconds
    with stoppable() as stop, stop.at_once(), tracing(script.target, as_module=script.as_module):
        from mezzo.commands.tune.forecast import forecasts, not_predicted, ruled_out
        from mezzo.measure.predict.tape_memory import DRIVER_BYTES

        found, notes = forecasts(
            script.target,
            script.arguments or (),
            configurations,
            gpu=gpu,
            as_module=script.as_module,
            in_time=lambda: budget.spent_s < end_s,
        )
    limits = [limit_bytes, None if gpu is None else gpu.memory_bytes - DRIVER_BYTES]
    limit = min((one for one in limits if one is not None), default=None)
    reasons = ruled_out(found, limit_bytes=limit, where=where, now=configurations[0])
    summary = Note(
        what="predictions",
        value=f"{len(reasons)} of {len(configurations)} configurations are not run",
        reason=f"{len(found)} were predicted for {where}",
    )
    notes = [summary, *notes, *not_predicted(configurations)]
    return RuledOut(reasons=reasons, notes=notes, found=found, gpu="" if gpu is None else gpu.name)
