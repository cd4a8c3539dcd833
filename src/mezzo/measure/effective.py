"""What really ran in which format, and which forward code a lowering policy did not reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mezzo.measure.flops import lowered
from mezzo.policy import Policy
from mezzo.records import Effective, Reason


@dataclass(kw_only=True)
class Counted:
    """Counts over one step, or over several."""

    by_format: dict[str, int] = field(default_factory=dict)
    """FLOPs of all products."""
    num_lowered: int | None = None
    """Operations, products or not, that read or wrote numbers below 32 bits; None if they were not counted."""
    outside: int = 0
    """FLOPs of forward code outside modules, autocast regions and compiled functions."""
    switched_off: int = 0
    """FLOPs of forward code inside those, where autocast was turned off again."""
    step: int | None = None
    """The first counted step."""
    uncounted: Mapping[str, str] = field(default_factory=dict)
    """Why FLOPs are missing from ``by_format``, by the operation's name."""
    in_updates: Mapping[str, int] = field(default_factory=dict)
    """FLOPs of optimizers' own products, which ``by_format`` includes."""


def effective(counted: Counted, policy: Policy | None, *, emulates: bool, uncounted: Effective) -> Effective:
    """Return what ran in which format, and what was left alone.

    Args:
        counted: the counts.
        policy: the run's policy as applied; None for the script's own precision.
        emulates: whether the policy's formats are emulated.
        uncounted: what is known without the counts.
    """
    left = [*uncounted.left_alone, *(_not_lowered(counted, policy) if policy is not None and policy.lowers else [])]
    missing = sorted(counted.uncounted.items())
    left += [Reason(what="FLOPs not counted", value=name, reason=why) for name, why in missing]
    rounds = emulates and (lowered(counted.by_format) or (not counted.by_format and counted.num_lowered != 0))
    counts: dict[str, object] = {
        "flops_by_format": dict(counted.by_format),
        "update_flops_by_format": dict(counted.in_updates),
        "emulated": rounds or (policy is not None and policy.world > 1),
        "num_lowered": counted.num_lowered,
        "counted_on_step": counted.step,
        "left_alone": left,
        "uncounted": [name for name, _ in missing],
    }
    return uncounted.model_copy(update=counts)


def _not_lowered(counted: Counted, policy: Policy) -> list[Reason]:
    """Return what ran in FP32 because the policy was not in effect there, or had nothing to lower."""
    total, num_lowered = sum(counted.by_format.values()), counted.num_lowered
    reasons = []
    if not total and num_lowered == 0 and not counted.uncounted:
        why = f"no matrix product, convolution or other operation ran that {policy.name} lowers, so it costs and gains nothing"
        reasons.append(Reason(what="nothing to lower", value="no products", reason=why))
    if counted.outside:
        why = (
            "forward code outside any module: only modules, autocast regions and compiled functions are switched. Call a "
            "model as model(x), not as model.forward(x); put other code into torch.autocast"
        )
        reasons.append(Reason(what="FP32 code", value=_share(counted.outside, total), reason=why))
    if counted.switched_off and not (policy.fp32_modules and num_lowered):  # else the policy itself keeps it in FP32
        why = "the script or a library turns autocast off there, as by torch.autocast(enabled=False), and is not overruled"
        if policy.fp32_modules:
            why = f"the policy keeps modules in FP32 ({', '.join(policy.fp32_modules)}), and nothing else was left to lower"
        reasons.append(Reason(what="FP32 inside modules", value=_share(counted.switched_off, total), reason=why))
    return reasons


def _share(flops: int, total: int) -> str:
    return f"{flops / total:.0%} of FLOPs and their backward pass"
