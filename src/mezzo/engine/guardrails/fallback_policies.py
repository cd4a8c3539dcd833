"""The policy to continue under if a smaller learning rate or another loss scale did not help: the next safer one, for the whole model.

    FP16 whose gradients left its range    BF16, which has FP32's range, unless the device would have to emulate it; then FP32
    any other alarm, and BF16              FP32

The guard does not know which modules left the format: once one gradient overflows, so do all before it. ``mezzo fallback`` finds them.
"""

from __future__ import annotations

from mezzo.devices import this_device
from mezzo.errors import MezzoError
from mezzo.policy import Policy
from mezzo.records import AlarmKind

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
