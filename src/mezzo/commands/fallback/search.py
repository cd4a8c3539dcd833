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

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

from mezzo.observe.module_names import covered, outermost

Names: TypeAlias = tuple[str, ...]
Verify: TypeAlias = Callable[[Names], float]


def search(
    ranked: Sequence[str],
    verify: Verify,
    *,
    tolerance: float,
    costs: Mapping[str, float] | None = None,
    base: Names = (),
    whole: Collection[str] = (),
    known: Mapping[Names, float] | None = None,
) -> Names | None:
    """Return a 1-minimal set of ``ranked`` modules, sorted, with which the error is at most ``tolerance``; None if even all of them fail.

    Args:
        ranked: names of modules, the most suspect first. The name of a nested module begins with that of its container and a dot.
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


def _shortest(ranked: Sequence[str], passes: Callable[[Names], bool]) -> int | None:
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


def _pruned(names: Names, passes: Callable[[Names], bool], costs: Mapping[str, float]) -> Names:
    """Return ``names``, sorted, without those that can go, until no single one can."""
    kept = outermost(names)
    while True:
        fewer = _pruned_once(kept, passes, costs)
        if fewer == kept:
            return kept
        kept = fewer


def _pruned_once(names: Names, passes: Callable[[Names], bool], costs: Mapping[str, float]) -> Names:
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
    kept: Names,
    *,
    ranked: Sequence[str],
    passes: Callable[[Names], bool],
    costs: Mapping[str, float],
    whole: Collection[str],
) -> Names:
    """Return ``kept`` with the most expensive container that can be opened replaced by what is needed inside it."""
    for name in sorted(set(kept) - set(whole), key=lambda name: -costs.get(name, 0.0)):
        inside = [other for other in ranked if other.startswith(f"{name}.")]
        others = tuple(other for other in kept if other != name)
        if inside and passes((*others, *inside)):
            length = _shortest(inside, lambda names, others=others: passes((*others, *names)))  # type: ignore[misc]
            return outermost((*others, *inside[:length]))
    return kept
