"""Align the events of two runs: weights, gradients and compare points by name, operations by their order. Pure.

Operations are aligned step by step, forward and backward apart, as lines of text are: first those with the same name, module and shapes,
then, in the gaps, those with the same name and shapes in modules of other names. Of what is left of a gap, the last operations are a pair
if one could replace the other: so a fused operation is paired with the last of its parts. What has no counterpart stays alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from typing import TypeAlias

import numpy as np

from mezzo.observe.values.log import (
    FOURTHS,
    NO_COUNTERPART,
    NUMBERS,
    ROUNDING,
    SKETCH,
    SQUARES,
    Event,
    EventKind,
    Floats,
    Output,
    ValuesLog,
    rows_of,
)

Pairs: TypeAlias = dict[int, int]
"""Events of the first run, each with the event of the second."""
_PRODUCTS = frozenset(("addmm", "mm", "bmm", "baddbmm", "matmul", "linear", "mkl_linear", "mv", "addmv", "dot"))
REARRANGES = frozenset(
    (
        "view",
        "reshape",
        "clone",
        "contiguous",
        "expand",
        "transpose",
        "permute",
        "flatten",
        "squeeze",
        "unsqueeze",
        "copy_",
    )
)
"""Operations that only move values."""
_NAMED: tuple[EventKind, ...] = ("weight", "buffer", "gradient", "update", "state", "point")
_IN_ORDER: tuple[EventKind, ...] = ("operation", "cast")


def aligned(a: ValuesLog, b: ValuesLog) -> Pairs:
    """Return which event of ``b`` each event of ``a`` is; events without a counterpart are left out."""
    if [e.op for e in a.events] == [e.op for e in b.events] and all(map(_same_place, a.events, b.events)):
        return {n: n for n in range(len(a.events))}
    pairs: Pairs = {}
    for kind in _NAMED:
        pairs |= _by_name(_of_kind(a, kind), _of_kind(b, kind), a, b)
    pairs |= _losses(a, b)
    first, second = _sequences(a), _sequences(b)
    for where in first.keys() & second.keys():
        pairs |= dict(_in_order(first[where], second[where], a, b))
    pairs |= _leaves_read_alike(a, b, pairs)
    return dict(sorted(pairs.items()))


def _same_place(one: Event, other: Event) -> bool:
    return (one.kind, one.step, one.phase, one.module) == (other.kind, other.step, other.phase, other.module) and (
        [output.shape for output in one.outputs] == [output.shape for output in other.outputs]
    )


def _of_kind(log: ValuesLog, kind: EventKind) -> list[int]:
    return [n for n, event in enumerate(log.events) if event.kind == kind]


def _by_name(first: Sequence[int], second: Sequence[int], a: ValuesLog, b: ValuesLog) -> Pairs:
    """Pair events of one kind by step and name; those whose names have no counterpart by their order in the step."""
    names, others = _numbered(first, a, _name), _numbered(second, b, _name)
    pairs = {n: others[key] for key, n in names.items() if key in others}
    taken = set(pairs.values())
    rest = _numbered([n for n in first if n not in pairs], a, _shape)
    left = _numbered([n for n in second if n not in taken], b, _shape)
    return pairs | {n: left[key] for key, n in rest.items() if key in left}


def _losses(a: ValuesLog, b: ValuesLog) -> Pairs:
    """Pair the losses of each step in which both runs have as many: micro-batches have losses of their own."""
    first: dict[int, list[int]] = defaultdict(list)
    second: dict[int, list[int]] = defaultdict(list)
    for log, found in ((a, first), (b, second)):
        for n in _of_kind(log, "loss"):
            found[log.events[n].step].append(n)
    return {
        n: other
        for step in first
        if len(first[step]) == len(second[step])
        for n, other in zip(first[step], second[step], strict=True)
    }


def _numbered(numbers: Sequence[int], log: ValuesLog, key: Callable[[Event], Hashable]) -> dict[Hashable, int]:
    """Return the events by key; those with one key are numbered."""
    counts: dict[Hashable, int] = defaultdict(int)
    found: dict[Hashable, int] = {}
    for n in numbers:
        known = key(log.events[n])
        found[known, counts[known]] = n
        counts[known] += 1
    return found


def _name(event: Event) -> Hashable:
    of_step = event.kind in ("gradient", "update", "state")
    return event.op if event.kind == "point" else event.module, event.step if of_step else 0


def _shape(event: Event) -> Hashable:
    return event.step, tuple(output.shape for output in event.outputs)


def _sequences(log: ValuesLog) -> dict[tuple[int, str], list[int]]:
    found: dict[tuple[int, str], list[int]] = defaultdict(list)
    for n, event in enumerate(log.events):
        if event.kind in _IN_ORDER:
            found[event.step, event.phase].append(n)
    return found


def _in_order(first: Sequence[int], second: Sequence[int], a: ValuesLog, b: ValuesLog) -> Iterator[tuple[int, int]]:
    gap: tuple[int, int] = (0, 0)
    for i, j, size in _matches([_place(a.events[n]) for n in first], [_place(b.events[n]) for n in second]):
        yield from _in_gap(first[gap[0] : i], second[gap[1] : j], a, b)
        yield from zip(first[i : i + size], second[j : j + size], strict=True)
        gap = i + size, j + size


def _in_gap(first: Sequence[int], second: Sequence[int], a: ValuesLog, b: ValuesLog) -> Iterator[tuple[int, int]]:
    gap: tuple[int, int] = (0, 0)
    for i, j, size in _matches([_function(a.events[n]) for n in first], [_function(b.events[n]) for n in second]):
        yield from _ends(first[gap[0] : i], second[gap[1] : j], a, b)
        yield from zip(first[i : i + size], second[j : j + size], strict=True)
        gap = i + size, j + size


def _ends(first: Sequence[int], second: Sequence[int], a: ValuesLog, b: ValuesLog) -> Iterator[tuple[int, int]]:
    """Pair the last operations of a gap, if one could replace the other: the values behind the gap are computed from them."""
    one, other = (
        next((n for n in reversed(numbers) if log.events[n].op not in REARRANGES), None)
        for numbers, log in ((first, a), (second, b))
    )
    if one is not None and other is not None and _replaces(a.events[one], b.events[other]):
        yield one, other


def _replaces(one: Event, other: Event) -> bool:
    """Return whether two operations of one module have results of one shape; a backward pass has several, in any order."""
    several = one.phase == "backward" and max(len(one.outputs), len(other.outputs)) > 1
    shapes = [(event.module, rows_of(event.outputs[0].shape), event.kind) for event in (one, other)]
    return not several and shapes[0] == shapes[1] and one.kind == "operation"


def _matches(first: list[Hashable], second: list[Hashable]) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of equal keys, as difflib finds them, after what both begin with."""
    shared = next(
        (n for n, (x, y) in enumerate(zip(first, second, strict=False)) if x != y), min(len(first), len(second))
    )
    yield 0, 0, shared
    for i, j, size in SequenceMatcher(None, first[shared:], second[shared:], autojunk=False).get_matching_blocks():
        yield i + shared, j + shared, size


def family(kernel: str) -> str:
    """Return the name under which operations count as the same: products have one, whatever kernel computes them."""
    return "product" if kernel in _PRODUCTS else kernel


def same_function(one: Event, other: Event) -> bool:
    """Return whether two events are of one function, with whatever kernel."""
    return one.op == other.op or family(one.kernel) == family(other.kernel)


def _function(event: Event) -> Hashable:
    """Return what operations have in common that compute the same: its name, its result's shape, and the length of its sums."""
    return family(event.kernel), event.outputs[0].shape, event.flops, event.kind == "cast" and event.outputs[0].format


def _place(event: Event) -> Hashable:
    return event.module, _function(event)


def _leaves_read_alike(a: ValuesLog, b: ValuesLog, pairs: Pairs) -> Pairs:
    """Pair data and constants that paired operations read at the same place, and others with the same bits."""
    found: Pairs = {}
    taken: set[int] = set()
    for n, other in pairs.items():
        reads, others = a.events[n].reads, b.events[other].reads
        for one, two in zip(reads, others, strict=False):
            left, right = a.events[one.event], b.events[two.event]
            leaves = left.kind == right.kind and left.kind in ("data", "constant")
            if leaves and left.outputs == right.outputs and one.event not in found and two.event not in taken:
                found[one.event] = two.event
                taken.add(two.event)
    rest, same = (_with_bits(log, paired) for log, paired in ((a, set(found)), (b, taken)))
    return found | {n: same[key] for key, n in rest.items() if key in same}


def _with_bits(log: ValuesLog, paired: set[int]) -> dict[Hashable, int]:
    """Return the data and constants without a counterpart, by their bits."""
    rest = [n for n, event in enumerate(log.events) if event.kind in ("data", "constant") and n not in paired]
    return _numbered(rest, log, lambda event: (event.kind, event.step, event.outputs, int(log.hashes[event.row])))


# A value with the same bits in all processes counts once: a weight, or a gradient after its reduction. Otherwise its processes are taken
# for parts of one batch, whose norm follows from theirs. The parts may have any order, so such a value is compared without a sketch.


def as_one(logs: Sequence[ValuesLog]) -> ValuesLog:
    """Return the values of several processes as one log; rank 0's alone, with the reason, where they did not run the same operations."""
    lead = logs[0]
    if len(logs) == 1:
        return lead
    other = next((n for n, log in enumerate(logs) if [e.op for e in log.events] != [e.op for e in lead.events]), None)
    if other is not None:
        why = f"rank {other} ran other operations, so that its values are no parts of the same ones"
        return replace(lead, environment={**lead.environment, "ranks": why})
    numbers, hashes = lead.numbers.copy(), lead.hashes.copy()
    events: list[Event] = []
    for n, event in enumerate(lead.events):
        rows = lead.rows(n)
        of_ranks = [log.numbers[log.rows(n)] for log in logs]
        same = np.all([log.hashes[log.rows(n)] == lead.hashes[rows] for log in logs], axis=0)
        outputs = list(event.outputs)
        for place in np.flatnonzero(~same):
            row = rows.start + int(place)
            hashes[row] = 0
            numbers[row] = _together([one[place] for one in of_ranks], outputs[place], outputs[0])
            if event.phase == "backward":  # each process has the gradient of its own mean, and their mean is meant
                numbers[row] *= _per_process(len(logs))
            if outputs[place].shape[:1] == outputs[0].shape[:1] and outputs[0].shape:
                shape = outputs[place].shape
                outputs[place] = replace(outputs[place], shape=(len(logs) * shape[0], *shape[1:]))
        flops = event.flops if same.all() else sum(log.events[n].flops for log in logs)
        events.append(replace(event, outputs=tuple(outputs), flops=flops))
    return replace(lead, events=events, hashes=hashes, numbers=numbers)


def _together(parts: Sequence[Floats], output: Output, first: Output) -> Floats:
    """Return the numbers of one value of several processes: parts of a batch, means over parts, or something that has no counterpart."""
    whole: Floats = np.sum(parts, axis=0)
    if not output.shape:  # the sketch of a mean is the mean of the sketches
        whole = whole / len(parts)
        whole[SQUARES], whole[FOURTHS] = (whole[SKETCH:] ** 2).sum(), (whole[SKETCH:] ** 4).sum()
        return whole
    whole[SKETCH:] = np.nan
    if output.shape[:1] != first.shape[:1]:
        whole[SQUARES] = NO_COUNTERPART
    return whole


def _per_process(ranks: int) -> Floats:
    """Return by what the numbers of a value are multiplied if the value is divided by the number of processes."""
    powers = np.ones(NUMBERS)
    powers[[SQUARES, ROUNDING, FOURTHS]] = 2, 2, 4
    return ranks**-powers
