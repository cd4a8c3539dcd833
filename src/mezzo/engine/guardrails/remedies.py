"""Changes after a return to a snapshot: an unchanged run would end the same way.

    loss spike, loss not finite, stuck updates    half the learning rate, also that of the schedule
    skip storm                                    a loss scale 16 times smaller; without a scale to change, half the learning rate
    gradients zero                                a loss scale 16 times larger; without a scale to change, the fallback policy
    scale at its floor                            the fallback policy, as the scale was smaller before; without one, as for a skip storm

The second return to the same snapshot keeps that change, and the run falls back to a safer policy (``fallback_policies``). Each later
return, or each one if no policy is safer, makes the change once more. The data is not rewound: other batches follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from mezzo.engine.scaling import DynamicScale
from mezzo.records import AlarmKind, Reason, Rewind

POLICY, UNCHANGED = "policy", "unchanged"
"""The name of a change of policy in the record, and its value if no policy is safer or the policy cannot change."""
_RATE, _SCALE = 0.5, 16.0
_OF_SCALE: tuple[AlarmKind, ...] = ("skip storm", "scale at its floor", "gradients zero")
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""The learning rates that optimizers and schedulers keep in a group."""


def apply_remedy(
    kind: AlarmKind,
    before: Sequence[Rewind],
    *,
    optimizers: Iterable[torch.optim.Optimizer],
    schedulers: Iterable[Any],
    scales: Iterable[Any],
    fall_back: Callable[[], Reason],
) -> list[Reason]:
    """Change the training after its return to a snapshot; return the changes, none if nothing helps.

    Args:
        kind: the alarm.
        before: the earlier returns to this snapshot, or to a later one: the snapshot does not contain their changes.
        optimizers: the training's optimizers.
        schedulers: their schedulers.
        scales: loss scales; only dynamic ones of Mezzo and ``torch.amp.GradScaler`` are changed.
        fall_back: changes the policy to a safer one, if possible; returns the new policy, or ``UNCHANGED``, and why.
    """
    policy = fall_back() if len(before) == 1 or kind == "scale at its floor" else None
    fell_back = policy is not None and policy.value != UNCHANGED
    if policy is not None and fell_back and kind in _OF_SCALE:
        return [policy]
    earlier = sum(change.what == POLICY and change.value != UNCHANGED for rewind in before for change in rewind.changes)
    changed = _numbers(kind, 1 + len(before) - earlier - fell_back, optimizers, schedulers, scales)
    if not changed and policy is None:  # gradients that are zero without a scale that could be larger
        policy = fall_back()
        fell_back = policy.value != UNCHANGED
    return [*changed, *([] if policy is None else [policy])] if changed or fell_back else []


def _numbers(
    kind: AlarmKind,
    times: int,
    optimizers: Iterable[torch.optim.Optimizer],
    schedulers: Iterable[Any],
    scales: Iterable[Any],
) -> list[Reason]:
    """Change the loss scale or the learning rate ``times`` times."""
    if kind in _OF_SCALE:
        factor = (_SCALE if kind == "gradients zero" else 1 / _SCALE) ** times
        changed = [reason for scale in scales if (reason := _scale(scale, factor, kind)) is not None]
        if changed or kind == "gradients zero":
            return changed
    return [_slower(_RATE**times, kind, optimizers, schedulers)]


def _scale(scale: Any, factor: float, kind: AlarmKind) -> Reason | None:
    tensor = getattr(scale, "_scale", None)
    if isinstance(scale, DynamicScale):
        state = scale.state_dict()
        value = min(max(state["scale"] * factor, scale.min_scale), scale.max_scale)
        scale.load_state_dict({**state, "scale": value})
    elif isinstance(tensor, torch.Tensor) and isinstance(scale, torch.amp.GradScaler):
        tensor.mul_(factor)
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
