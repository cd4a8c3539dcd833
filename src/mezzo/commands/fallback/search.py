"""Search for a small set of modules that must stay in FP32, with few verifications.

A verification runs a training step with a set of modules kept in FP32 and returns the largest error of a gradient. It is expensive, so no
set is verified twice. Modules are ranked, the most suspect first::

    nothing kept            passes: done
    1, 2, 4, 8 ... first    the shortest prefix of the ranking that passes: doubled, then halved
    prune                   drop modules: one at a time, then in groups that double as long as they can go
        open containers         if everything inside passes in place of the container, search inside
    prune again             until dropping any single module of the set has failed

If the ranking puts the s needed modules of n at its top, that takes about 2 log2(s) + s + 3 verifications. A bad ranking
costs more verifications, never a wrong result: the set has passed, and each set with one module fewer has failed (it is
1-minimal). It need not be the smallest of all sets. Doubling assumes that the error is monotone in the set; if it is not,
pruning still ends in a set that passes and is 1-minimal.

Imports no torch.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from mezzo import oplists
from mezzo.observe.fallback.evidence import LocalError, Measured, StepErrors
from mezzo.observe.module_names import covered, outermost
from mezzo.observe.settings import FallbackSettings
from mezzo.policy import Policy
from mezzo.records import RunRecord, clear_error
from mezzo.records.values import Value

ModuleSet: TypeAlias = tuple[str, ...]
Verify: TypeAlias = Callable[[ModuleSet], float]


def search(
    ranked: Sequence[str],
    verify: Verify,
    *,
    tolerance: float,
    costs: Mapping[str, float] | None = None,
    base: ModuleSet = (),
    whole: Collection[str] = (),
    known: Mapping[ModuleSet, float] | None = None,
) -> ModuleSet | None:
    """Return a 1-minimal set of ``ranked`` modules, sorted, with which the error is at most ``tolerance``; None if even all of them fail.

    Args:
        ranked: names of modules, the most suspect first. The name of a nested module begins with its container's name and a dot.
        verify: returns the error with these modules kept; a name includes everything inside it. NaN fails.
        tolerance: the largest error that passes.
        costs: the cost of keeping each module, 0 if left out; of two that could go, the more expensive is tried first.
        base: the set to start from, found by an earlier search.
        whole: containers that are not opened, because their own computation fails.
        known: errors that were verified before, by the set.
    """
    errors, costs = dict(known or {}), costs or {}

    def passes(names: Iterable[str]) -> bool:
        kept = outermost(names)
        if kept not in errors:
            errors[kept] = verify(kept)
        return errors[kept] <= tolerance

    if passes(base):
        return _pruned(base, passes, costs)
    free = [name for name in ranked if not covered(name, base)]
    length = _shortest(free, lambda names: passes((*base, *names)))
    if length is None:
        return None
    kept = _pruned((*base, *free[:length]), passes, costs)
    while (opened := _opened(kept, ranked=ranked, passes=passes, costs=costs, whole=whole)) != kept:
        kept = _pruned(opened, passes, costs)
    return kept


def _shortest(ranked: Sequence[str], passes: Callable[[ModuleSet], bool]) -> int | None:
    """Return the length of the shortest prefix that passes; the empty one is known to fail."""
    if not ranked:
        return None
    low, high = 0, 1
    while not passes(tuple(ranked[:high])):
        if high == len(ranked):
            return None
        low, high = high, min(2 * high, len(ranked))
    while high - low > 1:
        middle = (low + high) // 2
        if passes(tuple(ranked[:middle])):
            high = middle
        else:
            low = middle
    return high


def _pruned(names: ModuleSet, passes: Callable[[ModuleSet], bool], costs: Mapping[str, float]) -> ModuleSet:
    """Return ``names``, sorted, without those that can go, until no single one can."""
    kept = outermost(names)
    while True:
        fewer = _pruned_once(kept, passes, costs)
        if fewer == kept:
            return kept
        kept = fewer


def _pruned_once(names: ModuleSet, passes: Callable[[ModuleSet], bool], costs: Mapping[str, float]) -> ModuleSet:
    kept, size = names, 1
    waiting = sorted(names, key=lambda name: -costs.get(name, 0.0))
    while waiting:
        rest = tuple(name for name in kept if name not in waiting[:size])
        if passes(rest):
            kept, waiting, size = rest, waiting[size:], 2 * size
        elif size > 1:
            size //= 2
        else:
            waiting = waiting[1:]
    return kept


def _opened(
    kept: ModuleSet,
    *,
    ranked: Sequence[str],
    passes: Callable[[ModuleSet], bool],
    costs: Mapping[str, float],
    whole: Collection[str],
) -> ModuleSet:
    """Return ``kept`` with the most expensive container that can be opened replaced by what is needed inside it."""
    for name in sorted(set(kept) - set(whole), key=lambda name: -costs.get(name, 0.0)):
        inside = [other for other in ranked if other.startswith(f"{name}.")]
        others = tuple(other for other in kept if other != name)
        if inside and passes((*others, *inside)):
            length = _shortest(inside, lambda names, others=others: passes((*others, *names)))  # type: ignore[misc]
            return outermost((*others, *inside[:length]))
    return kept


# The error of a gradient under a policy is compared with what rounding alone does to that gradient. It is measured: a run in FP32 in
# which the output of every module is moved by one unit in the last place of the policy's format, up or down at random, on the same
# batches. Two other measures were tried. A fixed number of roundoffs blames healthy networks: rounding switches ReLUs, so a ResNet at its
# first step is off by 0.2 in FP16 and by 0.5 in BF16. The spread between batches, or between seeds, comes from the data: it is near 1 for
# most gradients, and hides what a format loses. In healthy networks the error is 0.3 to 0.9 times what this run measures, so this is the
# limit, or forty roundoffs where it is less.
#
# The limit ends at a half: a module that only amplifies what reaches it does so in this run too, and would excuse itself. A gradient that
# is lost has an error of 1. Gradients that rounding moves by 0.9 or more say nothing about a precision, and are not judged.
#
# Errors above the limit do not show that a module is at fault, either. If each module alone, on FP32 inputs, makes no more than rounding,
# the error comes from all of them together: a search would return whichever set happens to bring it below the limit, with most of the
# FLOPs. So a module *stands out* if its own error exceeds the tolerance, or if its values are lost as soon as its inputs are rounded as
# well. If none does, the limit is one and a half times the largest error of rounding in any gradient: a gradient of few elements varies
# so much that its own measure would blame every second healthy training (``python -m benchmarks verdicts`` simulates it). An error that
# is not clearly wrong passes up to twenty times that largest error. Where the limit is above a half, an error beyond it need not be a
# lost gradient, and nothing is decided.
#
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


def needed(policy: Policy, verify: Callable[[ModuleSet], float], *, tolerance: float, without: float) -> ModuleSet:
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


_MAX_LENGTH = 60


class SearchRun(NamedTuple):
    """A run of a search."""

    policy: Policy
    settings: FallbackSettings


TrialsAhead = Callable[[], Iterable[SearchRun]]
"""Yields the runs that may be requested after the current one, the nearest first."""


class Measure(Protocol):
    """A function that runs a few training steps under a policy."""

    def __call__(self, policy: Policy, settings: FallbackSettings, ahead: TrialsAhead) -> tuple[Measured, RunRecord]:
        """Return the measurements and the record of the run; the runs ``ahead`` may run at the same time."""
        ...


def name_of(kept: ModuleSet, operations: ModuleSet, *, all_steps: bool) -> str:
    """Return a name for a run from what it keeps in FP32: the same run has the same name whatever course the search takes."""
    parts = ["kept", *kept] if kept else ["operations", *operations] if operations else ["kept", "nothing"]
    text = "+".join(parts).replace("+", "-", 1).replace("/", "_")
    if len(text) > _MAX_LENGTH:
        count = len(kept or operations)
        text = f"{parts[0]}-{count}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return f"{text}-all-steps" if all_steps else text


def expected(
    search: Callable[[Measure], object], known: Sequence[Measured], run: RunRecord, guesses: Sequence[Measured]
) -> Iterator[SearchRun]:
    """Yield the runs that a search may request after the current one.

    Args:
        search: requests runs and depends only on their measurements: repeated with the same ones, it requests the same runs.
        known: the measurements of all runs before the current one.
        run: used as the record of every run.
        guesses: possible measurements of a run, the likeliest first.
    """
    waiting: deque[list[Measured]] = deque([[]])
    while waiting:
        assumed = waiting.popleft()
        for guess in guesses:
            trial = _requested_after(search, [*known, *assumed, guess], run)
            if trial is not None:
                yield trial
                waiting.append([*assumed, guess])


def guesses_for(reference: Measured) -> tuple[Measured, Measured]:
    """Return the measurements of a run that fails in every gradient, and of a run that passes."""
    names = [name for step in reference.steps for name in step.errors]
    failed, passed = (
        Measured(steps=[StepErrors(step=step.step, errors=dict.fromkeys(names, error)) for step in reference.steps])
        for error in (1.0, 0.0)
    )
    return failed, passed


class _RunRequested(Exception):
    def __init__(self, trial: SearchRun) -> None:
        super().__init__()
        self.trial = trial


def _requested_after(
    search: Callable[[Measure], object], known: Sequence[Measured], run: RunRecord
) -> SearchRun | None:
    """Return the run that a search requests after those with known measurements; None if it requests no more."""
    answers = iter(known)

    def measure(policy: Policy, settings: FallbackSettings, ahead: TrialsAhead) -> tuple[Measured, RunRecord]:
        found = next(answers, None)
        if found is None:
            raise _RunRequested(SearchRun(policy, settings))
        return found, run

    try:
        search(measure)
    except _RunRequested as request:
        return request.trial
    return None
