"""What changes after a return to a snapshot: an unchanged run would end the same way.

    loss spike, loss not finite, stuck updates    half the learning rate, of the schedule too
    skip storm, scale at its floor                a loss scale 16 times smaller; where there is none to change, half the learning rate
    gradients zero                                a loss scale 16 times larger; where there is none to change, nothing helps

Each further return makes the change once more. The data does not go back: other batches follow.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from mezzo.engine.scaling import DynamicScale
from mezzo.records import AlarmKind, Reason

_RATE, _SCALE = 0.5, 16.0
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""What optimizers and schedulers keep in a group."""


def apply_remedy(
    kind: AlarmKind,
    times: int,
    *,
    optimizers: Iterable[torch.optim.Optimizer],
    schedulers: Iterable[Any],
    scales: Iterable[Any],
) -> list[Reason]:
    """Change the training after its return to a snapshot; return the changes, none if nothing helps.

    Args:
        kind: the alarm.
        times: how often the training has returned to this snapshot, or to one after it, this time included.
        optimizers: the training's.
        schedulers: theirs.
        scales: dynamic loss scales, of Mezzo or ``torch.amp.GradScaler``; others are left alone.
    """
    if kind in ("skip storm", "scale at its floor", "gradients zero"):
        factor = (_SCALE if kind == "gradients zero" else 1 / _SCALE) ** times
        changed = [reason for scale in scales if (reason := _scale(scale, factor, kind)) is not None]
        if changed or kind == "gradients zero":
            return changed
    return [_slower(_RATE**times, kind, optimizers, schedulers)]


def _scale(scale: Any, factor: float, kind: AlarmKind) -> Reason | None:
    held = getattr(scale, "_scale", None)
    if isinstance(scale, DynamicScale):
        state = scale.state_dict()
        value = min(max(state["scale"] * factor, scale.min_scale), scale.max_scale)
        scale.load_state_dict({**state, "scale": value})
    elif isinstance(held, torch.Tensor) and isinstance(scale, torch.amp.GradScaler):
        held.mul_(factor)
    else:
        return None
    why = (
        "gradients were zero: a larger scale lifts them into the format"
        if factor > 1
        else f"{kind}: gradients overflowed"
    )
    return Reason(what="loss scale", value=f"x {factor:g}", reason=why)


def _slower(
    factor: float, kind: AlarmKind, optimizers: Iterable[torch.optim.Optimizer], schedulers: Iterable[Any]
) -> Reason:
    rates: list[float] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name in _RATES:
                if name in group:
                    group[name] = group[name] * factor
            rates.append(float(group["lr"]))
    for scheduler in schedulers:
        if hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]
    shown = ", ".join(f"{rate:.3g}" for rate in dict.fromkeys(rates))
    return Reason(
        what="learning rate", value=f"x {factor:g}, now {shown}", reason=f"{kind}: smaller steps from the same weights"
    )
