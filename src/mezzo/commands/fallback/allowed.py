"""How large the error of a gradient may be, and which modules make more than rounding on their own.

The error of a gradient under a policy is compared with what rounding alone does to that gradient. It is measured: a run in FP32 in which
the output of every module is moved by one unit in the last place of the policy's format, up or down at random, on the same batches. Two
other measures were tried. A fixed number of roundoffs blames healthy networks: rounding switches ReLUs, so a ResNet at its first step is
off by 0.2 in FP16 and by 0.5 in BF16. The spread between batches, or between seeds, is that of the data: it is near 1 for most gradients,
and hides what a format loses. In healthy networks the error is 0.3 to 0.9 times what this run measures, so this is the limit, or forty
roundoffs where it is less.

The limit ends at a half: a module that only amplifies what reaches it does so in this run too, and would excuse itself. A gradient that is
lost has an error of 1. Gradients that rounding moves by 0.9 or more say nothing about a precision, and are not judged.

Errors above the limit do not show that a module is at fault, either. If each module alone, on FP32 inputs, makes no more than rounding, the
error is that of all of them together: a search would return whichever set happens to bring it below the limit, with most of the FLOPs.
So a module *stands out* if its own error exceeds the tolerance, or if its values are lost as soon as its inputs are rounded as well.
If none does, the limit is one and a half times the largest error of rounding in any gradient: a gradient of few elements varies so
much that its own measure would blame every second healthy training (``python -m benchmarks verdicts`` simulates it). An error that is not
clearly wrong passes up to twenty times that largest error. Where the limit is above a half, an error beyond it need not be a lost gradient,
and nothing is decided.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from mezzo import oplists
from mezzo.commands.fallback.search import Names, search
from mezzo.observe.fallback.evidence import LocalError, StepErrors
from mezzo.observe.module_names import covered
from mezzo.policy import Policy
from mezzo.records import clear_error
from mezzo.records.values import Value

LOST_IN_ROUNDING = 0.9
"""A gradient that rounding alone moves by more than this share of itself is not judged."""
_MOST = 0.5
_HEADROOM = 1.5
_NOT_ROUNDING = 20.0
"""How many times the largest error of rounding no rounding explains: code outside the modules rounds what the measure does not."""


class Allowed(Value):
    """The largest error of each gradient that passes."""

    tolerance: float
    rounding: dict[str, float] = {}
    """What rounding alone does to each parameter's gradient; empty to allow the tolerance only."""

    def of(self, parameter: str) -> float:
        """Return the largest relative error of a parameter's gradient that passes."""
        return max(self.tolerance, min(_MOST, self.rounding.get(parameter, 0.0)))

    def furthest(self, steps: Sequence[StepErrors]) -> tuple[float, str]:
        """Return the error that is furthest beyond what is allowed, and its parameter; infinite without any step."""
        errors = [(error / self.of(name), error, name) for step in steps for name, error in step.errors.items()]
        _, error, name = max(errors, default=(0.0, 0.0, "") if steps else (math.inf, math.inf, ""))
        return error, name

    def is_rounding(self, steps: Sequence[StepErrors]) -> bool | None:
        """Return whether rounding in all modules together explains every error, if none of them stands out; None if that cannot be told."""
        worst = max((step.worst[0] for step in steps), default=math.inf)
        measured = max(self.rounding.values(), default=0.0)
        anywhere = _HEADROOM * measured
        if worst <= min(anywhere, LOST_IN_ROUNDING) or worst < min(
            clear_error(self.tolerance), _NOT_ROUNDING * measured
        ):
            return True
        return None if anywhere > _MOST and math.isfinite(worst) else False


def stand_out(local: Sequence[LocalError], tolerance: float, *, inside: Collection[str] | None = None) -> bool:
    """Return whether a module makes more than rounding on its own, or may do so because it could not be run alone.

    Args:
        local: the errors of all modules.
        tolerance: the policy's.
        inside: only these modules and those inside them; None for all.
    """
    lost = clear_error(tolerance)
    return any(
        one.reason or one.worst > tolerance or not one.rounded < lost
        for one in local
        if inside is None or (covered(one.module, inside) and not one.unnamed)
    )


# --- Find the operations to keep in FP32 wherever they run, if no set of modules helps ------------------------------------------

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
