"""Report which forward code a lowering policy did not reach, and what to do."""

from __future__ import annotations

from mezzo.policy import Policy
from mezzo.records import Reason


def not_lowered(
    policy: Policy, total: int, *, num_lowered: int | None, outside: int, switched_off: int
) -> list[Reason]:
    """Return what ran in FP32 because the policy was not in effect there, or had nothing to lower.

    Args:
        policy: the run's policy.
        total: FLOPs of all products of a step, forward and backward.
        num_lowered: operations, products or not, that read or wrote numbers below 32 bits; None if they were not counted.
        outside: FLOPs of forward code outside modules, autocast regions and compiled functions.
        switched_off: FLOPs of forward code inside those, where autocast was turned off again.
    """
    found = []
    if not total and num_lowered == 0:
        why = f"no matrix product, convolution or other operation ran that {policy.name} lowers, so it costs and gains nothing"
        found.append(Reason(what="nothing to lower", value="no products", reason=why))
    if outside:
        why = (
            "forward code outside any module: only modules, autocast regions and compiled functions are switched. Call a "
            "model as model(x), not as model.forward(x); put other code into torch.autocast"
        )
        found.append(Reason(what="FP32 code", value=_share(outside, total), reason=why))
    if switched_off and not (policy.fp32_modules and num_lowered):  # else the policy itself keeps it
        why = "the script or a library turns autocast off there, as by torch.autocast(enabled=False), and is not overruled"
        if policy.fp32_modules:
            why = f"the policy keeps modules in FP32 ({', '.join(policy.fp32_modules)}), and nothing else was left to lower"
        found.append(Reason(what="FP32 inside modules", value=_share(switched_off, total), reason=why))
    return found


def _share(flops: int, total: int) -> str:
    return f"{flops / total:.0%} of FLOPs and their backward pass"
