"""Changes after a return to a snapshot: an unchanged run would end the same way.

    loss spike, loss not finite, stuck updates    half the learning rate, also that of the schedule
    skip storm                                    a loss scale 16 times smaller; without a scale to change, half the learning rate
    gradients zero                                a loss scale 16 times larger; without a scale to change, the fallback policy
    scale at its floor                            the fallback policy, as the scale was smaller before; without one, as for a skip storm

The second return to the same snapshot keeps that change, and the run falls back to a safer policy (``fallback_policies``). Each later
return, or each one if no policy is safer, makes the change once more. The data is not rewound: other batches follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mezzo.devices import this_device
from mezzo.engine.scaling import DynamicScale
from mezzo.engine.snapshots.choosing import contents_at
from mezzo.engine.snapshots.folder import SavedSnapshot, saved_in
from mezzo.errors import MezzoError, SnapshotError
from mezzo.policy import Policy
from mezzo.records import AlarmKind, Reason, Rewind

_RATE, _SCALE = 0.5, 16.0
_OF_SCALE: tuple[AlarmKind, ...] = ("skip storm", "scale at its floor", "gradients zero")
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""The learning rates that optimizers and schedulers keep in a group."""


class SaferPolicy(NamedTuple):
    """The outcome of a search for a safer policy."""

    changed: bool
    """False if no policy is safer, or the policy cannot change."""
    note: Reason


def policy_note(value: str, reason: str) -> Reason:
    """Return the note of a change of policy in a record."""
    return Reason(what="policy", value=value, reason=reason)


def unchanged_policy(reason: str) -> SaferPolicy:
    """Return that the policy remains, and why."""
    return SaferPolicy(changed=False, note=policy_note("unchanged", reason))


class Remedy(NamedTuple):
    """What changed in a training for the rest of the run."""

    changes: list[Reason]
    """Empty if nothing helps."""
    changed_policy: bool = False


def apply_remedy(
    kind: AlarmKind,
    before: Sequence[Rewind],
    *,
    optimizers: Iterable[torch.optim.Optimizer],
    schedulers: Iterable[Any],
    scales: Iterable[Any],
    fall_back: Callable[[], SaferPolicy],
) -> Remedy:
    """Change the training after its return to a snapshot; return the changes.

    Args:
        kind: the alarm.
        before: the earlier returns to this snapshot, or to a later one: the snapshot does not contain their changes.
        optimizers: the training's optimizers.
        schedulers: their schedulers.
        scales: loss scales; only dynamic ones of Mezzo and ``torch.amp.GradScaler`` are changed.
        fall_back: changes the policy to a safer one, if possible.
    """
    policy = fall_back() if len(before) == 1 or kind == "scale at its floor" else None
    fell_back = policy is not None and policy.changed
    if policy is not None and fell_back and kind in _OF_SCALE:
        return Remedy([policy.note], changed_policy=True)
    earlier = sum(rewind.changed_policy for rewind in before)
    changed = _numbers(kind, 1 + len(before) - earlier - fell_back, optimizers, schedulers, scales)
    if not changed and policy is None:  # gradients that are zero without a scale that could be larger
        policy = fall_back()
        fell_back = policy.changed
    if not (changed or fell_back):
        return Remedy([])
    return Remedy([*changed, *([] if policy is None else [policy.note])], changed_policy=fell_back)


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


# --- fallback policies -----------------------------------------------------------------------------------------------------------

# The policy to continue under if a smaller learning rate or another loss scale did not help: the next safer one, for the whole model.
#
#     FP16 whose gradients left its range    BF16, which has FP32's range, unless the device would have to emulate it; then FP32
#     any other alarm, and BF16              FP32
#
# The guard does not know which modules left the format: once one gradient overflows, so do all before it. ``mezzo fallback`` finds them.

OF_RANGE: tuple[AlarmKind, ...] = ("skip storm", "scale at its floor", "gradients zero", "loss not finite")
"""Alarms that gradients or activations beyond the range of FP16 cause."""
_WITH_MORE_RANGE = {"fp16": "bf16", "fp16-master": "bf16-master"}
_KEPT = ("arithmetic", "op_lists", "lower", "fp32", "widest", "fp32_modules")
_KEPT_IN_FP32 = ("reduce", "gather", "world", "reduce_order")


def safer_policy(policy: Policy, kind: AlarmKind, device_type: str) -> tuple[Policy, str] | str:
    """Return the policy to continue under after an alarm, and the reason; or why there is none.

    Args:
        policy: the policy of the run so far.
        kind: the alarm.
        device_type: the device type that the run trains on.
    """
    if not policy.lowers:
        return f"{policy!s} lowers nothing, so there is no safer policy"
    if policy.compute == "fp8":
        return "layers were replaced by FP8 ones when the run began, and stay in FP8"
    if policy.casting == "model" and not policy.master_weights:
        return f"under {policy.name} the weights themselves are in 16 bits, and remain so"
    if policy.reduce == "fp16":
        return "gradients are summed over processes in FP16 (reduce=fp16), which needs the loss scale"
    if policy.gather not in ("auto", "fp32"):
        return f"weights are gathered over processes in {policy.gather.upper()} (gather={policy.gather}), which a run cannot change"
    wider = _wider(policy, device_type) if kind in OF_RANGE else None
    if wider is not None:
        return wider, f"{kind}: values left the range of FP16; BF16 has the range of FP32"
    why = f"{kind}: with {policy.compute.upper()} ruled out, the same alarm again has another cause"
    return Policy.parse("fp32").replace(**{name: getattr(policy, name) for name in _KEPT_IN_FP32}), why


def _wider(policy: Policy, device_type: str) -> Policy | None:
    name = _WITH_MORE_RANGE.get(policy.name) if policy.compute == "fp16" else None
    if name is None:
        return None
    fields = {name: getattr(policy, name) for name in (*_KEPT, *_KEPT_IN_FP32)}
    device = this_device(device_type)
    try:
        wider = Policy.parse(name).replace(**fields)
        arithmetic = wider.arithmetic_on(device)[0]
        slower = arithmetic == "emulated" and policy.arithmetic_on(device)[0] == "native"
    except MezzoError:  # the device has no BF16, or a field belongs to FP16
        return None
    return None if slower else wider


# --- Find the newest snapshot from before a training run went wrong: saved before the evidence began, and with finite weights ---


def newest_good(
    folder: Path,
    *,
    before: int,
    weights: Callable[[Any], Any],
    read: Callable[[SavedSnapshot], Any] = lambda saved: contents_at(saved.path),
) -> tuple[SavedSnapshot, Any] | None:
    """Return the newest snapshot of fewer than ``before`` updates with finite weights, and its contents; None if there is none.

    Snapshots saved after it are deleted: they belong to the faulty part of the run, and would be loaded as the newest.

    Args:
        folder: the folder of the snapshots.
        before: the first update of the evidence, counting skipped ones.
        weights: returns the part of a snapshot's contents that must be finite.
        read: returns the contents, or raises ``SnapshotError``.
    """
    after: list[SavedSnapshot] = []
    for saved in saved_in(folder):
        if saved.updates < before and not saved.calls:
            try:
                contents = read(saved)
            except SnapshotError:
                continue
            if _finite(weights(contents)):
                for later in after:
                    later.path.unlink(missing_ok=True)
                return saved, contents
        after.append(saved)
    return None


def _finite(tree: Any) -> bool:
    tensors = [tensor for tensor in tree_leaves(tree) if isinstance(tensor, Tensor) and tensor.is_floating_point()]
    # Healthy models have masks of -infinity: only NaN and +infinity are signs of a fault.
    return not any(bool((tensor.isnan() | (tensor == math.inf)).any()) for tensor in tensors)
