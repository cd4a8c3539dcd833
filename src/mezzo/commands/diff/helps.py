"""What brings the second run nearer to the first: policies tried in one step each, and the smallest set in FP32. Imports no torch.

Tried are the other 16-bit format, wider sums, the last product and the first in FP32, then what ``mezzo fallback`` searches for: a set
of modules that halves the distance, of which none can go. If all modules together do not halve it, the code outside them is searched, by
operations.
Limit: rounding that is spread over all layers has no small set; the search ends after ``_MOST_TRIALS`` runs with the best set so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mezzo.commands.diff.answer import first_names
from mezzo.commands.diff.record import DiffTrial
from mezzo.commands.fallback.search import ModuleSet, in_fp32, needed, search
from mezzo.formats import FP32
from mezzo.observe.module_names import covered, outermost
from mezzo.observe.values.log import Event, ValuesLog
from mezzo.policy import Policy
from mezzo.policyfields import MODULE_FIELDS, PROMOTED

_FORMATS = {"bf16": "fp16", "fp16": "bf16"}
_KEPT_FIELDS = ("norms", "arithmetic", "op_lists", *MODULE_FIELDS)
"""What a policy in the other 16-bit format keeps; how the loss is scaled belongs to the format."""
_MOST_TRIALS = 20
_NO_ERROR = 2.0**-60
_GOAL = 0.5
"""The share of the distance that a set of modules may leave."""


class Candidate(NamedTuple):
    """A policy that could help."""

    what: str
    policy: Policy
    modules: ModuleSet = ()
    """The modules that it raises."""


class _Enough(Exception):
    """The search has used its runs."""


@dataclass(kw_only=True)
class Trials:
    """The trials of one command."""

    policy: Policy
    """The second run's."""
    same_as: Policy | None
    """The first run's, which is no trial; None if it has the script's own precision."""
    b: ValuesLog
    """The second run."""
    distance: float
    """How far it is from where it should be."""
    run: Callable[[str, Policy], float]
    """Runs one step under a policy, which is shown as a text; returns the distance that is left, infinite if there is none."""
    left: dict[Policy, float] = field(default_factory=dict)
    """The distance that each policy tried leaves."""

    def all(self, *, searches: bool) -> list[DiffTrial]:
        """Return the trials, each policy once; ``searches`` also finds the smallest set in FP32."""
        if not self.distance:
            return []
        tried = [one for one in candidates(self.policy, self.b) if one.policy != self.same_as]
        found = [self._trial(one) for one in tried if math.isfinite(self._left(one))]
        if searches:
            found += self._smallest()
        return list({one.policy: one for one in found}.values())

    def _smallest(self) -> Iterator[DiffTrial]:
        names, goal = ranked(self.b), _GOAL * self.distance
        whole = outermost(names)
        everything = Candidate("all modules in fp32", self.raised(whole), whole)
        if not names or not self._left(everything) <= goal:
            if names and math.isfinite(self._left(everything)):
                yield self._trial(everything)
            yield from self._operations(goal)
            return
        flops = {name: float(self._flops((name,))) for name in names}
        known: dict[ModuleSet, float] = {(): self.distance, whole: self._left(everything)}
        try:
            found = search(names, self._with_modules, tolerance=goal, costs=flops, known=known)
            what = "the smallest set found that halves it"
        except _Enough:
            found = min(self._passed(goal), key=self._flops, default=None)
            what = f"a set that halves it; {_MOST_TRIALS} runs found none smaller"
        if found:
            yield self._trial(Candidate(f"{what} ({first_names(found)})", self.raised(found), found))

    def _operations(self, goal: float) -> Iterator[DiffTrial]:
        try:
            found = needed(self.policy, self._with_operations, tolerance=goal, without=self.distance)
        except _Enough:
            return
        if found:
            what = f"the operations that halve it ({', '.join(found)})"
            yield self._trial(Candidate(what, in_fp32(self.policy, found)))

    def _with_modules(self, names: ModuleSet) -> float:
        return self._left(Candidate(f"in fp32 ({first_names(names)})", self.raised(names), names))

    def _with_operations(self, names: ModuleSet) -> float:
        return self._left(Candidate(f"operations in fp32: {len(names)}", in_fp32(self.policy, names)))

    def raised(self, names: Sequence[str]) -> Policy:
        """Return the second run's policy with further modules in FP32."""
        return self.policy.replace(fp32_modules=(*self.policy.fp32_modules, *names))

    def _left(self, one: Candidate) -> float:
        if one.policy not in self.left:
            if len(self.left) >= _MOST_TRIALS:
                raise _Enough
            self.left[one.policy] = self.run(one.what, one.policy)
        return self.left[one.policy]

    def _passed(self, goal: float) -> list[ModuleSet]:
        base = self.policy.fp32_modules
        tried = [(one, tuple(one.fp32_modules[len(base) :])) for one, left in self.left.items() if left <= goal]
        return [names for one, names in tried if names and one == self.raised(names)]

    def _trial(self, one: Candidate) -> DiffTrial:
        left = self._left(one)
        inside = [event for event in self._first_step() if covered(event.module, one.modules)]
        kept = [output for event in inside if event.phase == "forward" for output in event.outputs]
        whole = sum(event.flops for event in self._first_step()) or 1
        return DiffTrial(
            policy=str(one.policy),
            what=one.what,
            distance=left,
            share=removed(left, of=self.distance),
            flops_in_fp32=self._flops(one.modules) / whole,
            more_bytes=sum(2 * math.prod(output.shape) for output in kept),
        )

    def _flops(self, modules: ModuleSet) -> int:
        return sum(event.flops for event in self._first_step() if covered(event.module, modules))

    def _first_step(self) -> list[Event]:
        return [event for event in self.b.events if event.step == 1 and event.kind == "operation"]


def candidates(policy: Policy, b: ValuesLog) -> Iterator[Candidate]:
    """Yield what could bring a policy nearer without a search."""
    other = _FORMATS.get(policy.compute)
    if other is not None and policy.name.startswith(policy.compute):
        preset = Policy.parse(policy.name.replace(policy.compute, other))
        sums = ("gradients",) if policy.casting == "ops" else ()
        kept = {name: getattr(policy, name) for name in (*_KEPT_FIELDS, *sums)}
        yield Candidate(f"{other} in place of {policy.compute}", preset.replace(**kept))
    if policy.accumulate != FP32.name:
        yield Candidate("products added up in fp32", policy.replace(accumulate=FP32.name))
        if policy.accumulate != PROMOTED:
            yield Candidate("sums added up in fp32 after 128 products", policy.replace(accumulate=PROMOTED))
    if policy.changes_gradients and policy.gradients != "auto":
        yield Candidate("gradients added up in their own format", policy.replace(gradients="auto"))
    named = modules_of(b)
    products = [e.module for e in b.events if e.step == 1 and e.phase == "forward" and e.flops and e.module in named]
    for which, module in zip(("last", "first"), dict.fromkeys((*products[-1:], *products[:1])), strict=False):
        raised = policy.replace(fp32_modules=(*policy.fp32_modules, module))
        yield Candidate(f"the {which} product in fp32 ({module})", raised, (module,))


def ranked(b: ValuesLog) -> list[str]:
    """Return the modules that compute anything in the first step, those with the largest rounding errors of their own first.

    Errors within a factor of two count as equal: of these, the last module comes first, whose error nothing averages.
    """
    named = modules_of(b)
    errors: dict[str, float] = {}
    for event in b.events:
        if event.step == 1 and event.phase == "forward" and event.kind == "operation" and event.module in named:
            before = errors.pop(event.module, _NO_ERROR)  # so that the order is of the last calls
            known = event.error is not None and math.isfinite(event.error)
            errors[event.module] = max(before, event.error or 0.0) if known else before
    places = {name: place for place, name in enumerate(errors)}
    return sorted(errors, key=lambda name: (round(math.log2(errors[name])), places[name]), reverse=True)


def modules_of(log: ValuesLog) -> set[str]:
    """Return the names of modules inside the models: those with weights, and those inside a module."""
    paths = {event.module.rpartition(".")[0] for event in log.events if event.kind == "weight"}
    return paths | {event.module for event in log.events if event.kind == "operation" and "." in event.module}


def removed(apart: float, *, of: float) -> float:
    """Return the share of a distance that is gone; both may be infinite."""
    if math.isinf(of):
        return float(math.isfinite(apart))
    return 1 - apart / of if of else 0.0
