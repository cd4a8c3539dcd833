"""Find the operations to keep in FP32 wherever they run, if no set of modules helps. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mezzo import oplists
from mezzo.observe.fallback.search import Names, search
from mezzo.policy import Policy

_LIKELY = ("mul", "einsum", "add", "div", "bmm", "baddbmm", "mean", "sqrt", "var")
"""Operations that models use between their modules: tried first."""
_PRODUCTS = ("prelu", "rnn", "attention", "conv", "matmul")
"""Families that do nearly all the work: tried last."""


def candidates(policy: Policy) -> list[str]:
    """Return the operations and families that ``policy`` does not keep in FP32, the likely ones first."""
    chosen = oplists.assign(policy.lower, policy.fp32, policy.widest)
    others = [f.name for f in oplists.FAMILIES if f.name not in (*_LIKELY, *_PRODUCTS)]
    names = (*_LIKELY, *others, *_PRODUCTS)
    return [name for name in names if any(chosen[op] != "fp32" for op in oplists.resolve(name))]


def in_fp32(policy: Policy, operations: Sequence[str]) -> Policy:
    """Return ``policy`` with operations, or families of them, in FP32."""
    lists = {field: tuple(n for n in getattr(policy, field) if n not in operations) for field in ("lower", "widest")}
    return policy.replace(fp32=tuple(dict.fromkeys((*policy.fp32, *operations))), **lists)


def needed(policy: Policy, verify: Callable[[Names], float], *, tolerance: float, without: float) -> Names:
    """Return a 1-minimal set of operations that must run in FP32; empty if even all together do not help.

    Args:
        policy: the policy to judge.
        verify: returns the largest error of a gradient with these operations and families in FP32.
        tolerance: the largest error that passes.
        without: the error with none of them, which fails.
    """
    names = candidates(policy)
    everything = tuple(sorted(names))
    if not names or not (together := verify(everything)) <= tolerance:
        return ()
    return search(names, verify, tolerance=tolerance, known={(): without, everything: together}) or ()
