"""What to do if no set of modules helps: keep operations in FP32 wherever they run, or try another command. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mezzo import oplists
from mezzo.observe.fallback.search import Names, search
from mezzo.policy import Policy
from mezzo.records import FallbackVerdict, Reason

_LIKELY = ("mul", "einsum", "add", "div", "bmm", "baddbmm", "mean", "sqrt", "var")
"""Operations that models use between their modules: tried first."""
_PRODUCTS = ("prelu", "rnn", "attention", "conv", "matmul")
"""Families with nearly all of the work: tried last."""

Command = Callable[[str, str], str]
"""Returns the command line of a Mezzo command under a policy."""


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
    known: dict[Names, float] = {(): without}

    def verified(kept: Names) -> float:
        if kept not in known:
            known[kept] = verify(kept)
        return known[kept]

    if not names or not verified(tuple(sorted(names))) <= tolerance:
        return ()
    return search(names, verified, tolerance=tolerance).kept or ()


def next_steps(
    verdict: FallbackVerdict, policy: Policy, command: Command, *, helped: bool, unchanged: bool
) -> list[Reason]:
    """Return what to do after a search that ended without a set of modules.

    Args:
        verdict: how it ended.
        policy: the policy that was judged.
        command: returns the command line.
        helped: whether operations in FP32 help.
        unchanged: whether the policy changes no bit of any gradient.
    """
    if verdict == "fp32 fails":
        why = "it names the operation that is not finite in FP32, its line and what to write"
        return [Reason(what="find the operation", value=command("diagnose", "fp32"), reason=why)]
    if verdict == "not repeatable":
        why = "set the script's seeds, and let it read the same batches in the same order at each start"
        return [Reason(what="make it repeat", value=command("fallback", str(policy)), reason=why)]
    if verdict == "not needed" and unchanged:
        why = "it lists each product with its format, and why it stays in FP32"
        return [Reason(what="find out why", value=command("audit", str(policy)), reason=why)]
    if verdict != "elsewhere":
        return []
    name = "it names the operation that loses values and its line, and tries that operation in FP32"
    found = [Reason(what="find the operation", value=command("diagnose", str(policy)), reason=name)]
    if policy.compute != "bf16" and not helped:
        why = "BF16 has FP32's range: if it passes, range is the cause, and BF16 the cure"
        found.append(Reason(what="try BF16", value=command("fallback", "bf16"), reason=why))
    move = "fp32_modules keeps the parts of a model, not what the model's own forward computes"
    found.append(Reason(what="or give it a name", value="put that operation into a module of its own", reason=move))
    return found
