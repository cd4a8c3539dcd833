"""Explain why a matrix product or convolution ran in FP32 or wider.

``off``        no autocast was on around it
``switched off``  an autocast of the script is around it, and off: ``enabled=False``, or for another device
``excluded``   autocast was on when a module began, and off at the operation inside it
``list``       a rule of an op list puts it in FP32, or the operation that it is a part of: torch's attention widens 16-bit
               operands itself if no fused kernel supports them, for example with dropout on a CPU
``promotion``  it read FP32 operands: a rule takes the widest, or a value became FP32 next to FP32 values
``no rule``    autocast was on and has no rule for it: it has none for operations with an ``out`` argument
``float64``    its operands are FP64, which autocast never casts

Inside a dispatch mode autocast is always off. So the cause follows from whether it was on when the module began, and how many autocast
contexts were around the operation: one more than around the module means the script's own ``autocast(enabled=False)``, equally many
a rule. The lists of a Mezzo policy are read from the policy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mezzo import oplists
from mezzo.formats import FP64
from mezzo.observe.audit.layers import compute_dtype, why_wide_in_layer
from mezzo.observe.audit.operations import TracedOperation
from mezzo.observe.limits import WIDE
from mezzo.observe.module_names import Names
from mezzo.observe.trace import TracedProduct
from mezzo.policy import Policy
from mezzo.records import Cause

_PROMOTING = ("tensordot", "bilinear", "dot", "vdot")
_FAMILY = {
    "convolution": "conv",
    "mkldnn_rnn_layer": "rnn",
    "_cudnn_rnn": "rnn",
}


@dataclass(frozen=True)
class Why:
    """The cause of a wide product, the module that it belongs to, and a sentence."""

    cause: Cause
    module: str
    reason: str


def why_wide(seen: TracedOperation, *, policy: Policy | None, lowers_elsewhere: bool, name: Names) -> Why:
    """Return the reason why the forward product ``seen`` ran in FP32 or wider.

    Args:
        seen: the product.
        policy: the policy of the run, if any.
        lowers_elsewhere: whether other products of the step ran in 16 bits.
        name: the paths of modules.
    """
    product = seen.product
    assert product is not None
    if product.format == FP64.name:
        return Why("float64", seen.module, "its operands are FP64, and FP64 is never cast")
    calls = seen.noted.entry.calls
    dtype = compute_dtype(calls[0].module) if calls else ""
    if dtype:
        promoted = bool(seen.promoted_in)
        cause, why = why_wide_in_layer(
            dtype, seen.module, seen.op, lowers_elsewhere=lowers_elsewhere, promoted=promoted
        )
        return Why(cause, seen.promoted_in if cause == "promotion" else seen.module, why)
    on = next((call for call in calls if call.autocast), None)
    if on is not None and on is calls[0] and product.nesting <= on.nesting:
        return _ruled(seen, product, policy)
    if on is not None:
        where = name.of(on.module)
        return Why("excluded", where, f"autocast is on when {where} begins and off at this operation")
    if seen.promoted_in:
        return Why("promotion", seen.promoted_in, "it reads a value that became FP32 by meeting FP32 operands")
    if lowers_elsewhere:
        return Why("off", seen.module, "autocast is off around it, and on elsewhere")
    # Checkpointing recomputes in an autocast of its own, on or off.
    around = 0 if seen.phase == "recompute" else calls[-1].nesting if calls else product.nesting
    if policy is None and around:
        return Why(
            "switched off", seen.module, "the script's autocast around it is off: enabled=False, or for another device"
        )
    return Why("off", seen.module, "nothing in the step lowers precision")


def _listed(policy: Policy | None, seen: TracedOperation) -> oplists.Precision | None:
    if policy is None or not policy.lowers:
        return None
    chosen = oplists.assign(policy.lower, policy.fp32, policy.widest)
    family = _FAMILY.get(seen.op) or ("attention" if "attention" in seen.op else "matmul")
    precisions: set[oplists.Precision] = {chosen[op] for op in oplists.BY_NAME[family].ops}
    return next((p for p in ("fp32", "widest") if p in precisions), "lower")


def _ruled(seen: TracedOperation, product: TracedProduct, policy: Policy | None) -> Why:
    if "out" in seen.noted.func._overloadname:
        return Why("no rule", seen.module, f"autocast has no rule for {seen.op} that writes into given memory (out=)")
    called = next((c for c in product.callers if c in _PROMOTING), "")
    listed = _listed(policy, seen)
    if called or listed == "widest":
        return Why("promotion", seen.module, f"{called or seen.op} takes the widest of its operands' formats, FP32")
    if listed == "fp32":
        return Why("list", seen.module, f"the policy lists the family of {seen.op} in FP32")
    around = f"the operation around {seen.op} computes in FP32"
    return Why(
        "list", seen.module, f"{around}: autocast's lists keep it there, or it is attention without a fused kernel"
    )


def lowers(step: Iterable[TracedOperation]) -> bool:
    """Return whether a product of a forward or backward pass ran in 16 bits; an optimizer's own (Muon's) says nothing about autocast."""
    return any(one.product is not None and not is_wide(one) and one.phase != "optimizer" for one in step)


def is_wide(seen: TracedOperation) -> bool:
    """Return whether ``seen`` is a product in FP32 or wider."""
    return seen.product is not None and seen.format in WIDE
