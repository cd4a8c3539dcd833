"""Decide what rounding explains of the difference of two runs, and where the rest began. Pure.

How far rounding alone carries a value is measured, not assumed: a *control* run of one side has every rounding error mirrored at random
(``mezzo.observe.values.tracer``). A value is *beyond rounding* if its distance from the other run is more than ``TIMES`` the control's,
the control's of what it was computed from, or the rounding of its format. A difference *begins* at such a value if none of its ancestors
is one. Without a control, as between two records, a value is beyond rounding where the distance grows ``JUMP``-fold in one operation,
and leads to an outcome that is ``JUMP`` roundings apart.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mezzo.commands.diff.align import REARRANGES, Pairs, aligned, same_function
from mezzo.observe.values.log import (
    LEAVES,
    OUTCOMES,
    ROUNDING,
    SQUARES,
    UNSCALES,
    Event,
    EventKind,
    Floats,
    ValueRead,
    ValuesLog,
    distances,
    rounding,
)

_ADDS = frozenset(("add", "add_", "sub", "sub_", "sum", "accumulate_grad", "cat", "stack"))
_ONLY_READ = ("cast", "gradient", "loss", "point", "state")
_RESCALES = frozenset(("mul", "div"))
_TINY = 1e-300
ALWAYS_BOTH: tuple[EventKind, ...] = ("gradient", "update", "point")
"""What both runs have unless they differ."""
TIMES = 16.0
"""How much further than in the control a value may be: that is one draw of the roundings, and a rewritten operation rounds elsewhere."""
JUMP = 64.0
"""The growth of a distance in one operation that rounding hardly explains."""

_KERNELS = ("foreach=", "fused=", "capturable=", "differentiable=")


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """Where a difference beyond rounding begins."""

    a: int
    """The event of the first run."""
    b: int
    """The event of the second run."""
    distance: float
    allowed: float
    """The largest distance that rounding explains."""
    only_a: tuple[int, ...] = ()
    """Operations between it and the last values that agree, which only the first run has."""
    only_b: tuple[int, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    """Settings that differ, in the first run and in the second."""
    formats: tuple[str, str] | None = None
    """The formats of its result, if they differ and were to be the same."""
    parts: bool = False
    """Whether it reads another part of a value."""
    others: tuple[int, ...] = ()
    """Events of the first run that begin in the same way: other parameters of one optimizer, other weights."""


@dataclass(kw_only=True)
class Parting:
    """The difference of two runs."""

    pairs: Pairs
    distance: dict[int, float] = field(default_factory=dict)
    """By event of the first run: the relative distance from its counterpart."""
    allowed: dict[int, float] = field(default_factory=dict)
    """By event of the first run: the largest distance that rounding explains."""
    first: tuple[int, int] | None = None
    """The first computed value that is not identical, in both runs."""
    beginnings: list[Beginning] = field(default_factory=list)
    """In the order of the first run."""
    unstable: list[int] = field(default_factory=list)
    """Events of the first run at which it does not repeat itself, the earliest of each chain."""
    only_a: list[int] = field(default_factory=list)
    """Gradients, updates and compare points that only the first run has."""
    only_b: list[int] = field(default_factory=list)
    """The same of the second run."""

    @property
    def identical(self) -> bool:
        """Whether both runs have the same gradients, updates and compare points, and all bits of all values are equal."""
        return not (any(self.distance.values()) or self.only_a or self.only_b)


def judge(
    a: ValuesLog,
    b: ValuesLog,
    *,
    again: ValuesLog | None = None,
    control: ValuesLog | None = None,
    control_of_b: bool = False,
    same_formats: bool = True,
) -> Parting:
    """Return where two runs part.

    Args:
        a: the first run.
        b: the second run.
        again: the first run once more; None if it was not repeated.
        control: a run with mirrored rounding errors; None without one.
        control_of_b: whether it is a run of the second side.
        same_formats: whether both were to compute in the same formats, so that a narrower one is a difference.
    """
    pairs = aligned(a, b)
    found = Parting(pairs=pairs)
    found.only_a = [n for n, event in enumerate(a.events) if event.kind in ALWAYS_BOTH and n not in pairs]
    of_b = set(pairs.values())
    found.only_b = [n for n, event in enumerate(b.events) if event.kind in ALWAYS_BOTH and n not in of_b]
    repeats = {} if again is None else _apart(a, again)
    moved = {} if control is None else _apart(b if control_of_b else a, control)
    found.unstable = _begun(a, {n for n, apart in repeats.items() if apart.any()})
    carried_a, carried_b = _carried(a), _carried(b)
    noise_of_reads = _noise_of_reads(b if control_of_b else a, moved)
    pooled = _of_updates(a, b, pairs, moved, of_b=control_of_b)
    far, results = set[int](), dict[int, Floats]()
    for n, other in pairs.items():
        apart = results[n] = distances(a, b, n, other)
        noise = moved.get(other if control_of_b else n, np.zeros(1))
        before = noise_of_reads[other if control_of_b else n]
        least = np.maximum(rounding(a, n), carried_a[n])
        if not same_formats:
            least = np.maximum(least, np.maximum(_fitting(rounding(b, other), apart), carried_b[other]))
        if control is None:
            formats = np.maximum(JUMP * least, TIMES * _fitting(repeats.get(n), apart))
            allowed = np.maximum(formats, JUMP * _brought(a, n, results))
            if bool((apart > formats).any()):
                far.add(n)
            if _follows(a.events[n], b.events[other], found):
                allowed = np.full(len(apart), np.inf)  # the sign of a small gradient decides: nothing measured it
        else:
            noise = np.maximum(_fitting(noise, apart), _fitting(repeats.get(n), apart))
            if _follows(a.events[n], b.events[other], found):
                noise = np.maximum(noise, pooled.get(a.events[n].step, 0.0))
            allowed = TIMES * np.maximum(np.maximum(noise, least), before)
        with np.errstate(divide="ignore", invalid="ignore"):
            worst = int(np.nan_to_num(apart / allowed, nan=0.0).argmax())
        found.distance[n], found.allowed[n] = float(apart[worst]), float(allowed[worst])
    found.first = next(((n, m) for n, m in pairs.items() if found.distance[n] and a.events[n].kind not in LEAVES), None)
    beyond = {n for n in pairs if found.distance[n] > found.allowed[n]}
    beyond &= _lasting(a, beyond if control is not None else far, pairs)
    found.beginnings = _grouped(a, b, _beginnings(a, b, found, beyond, same_formats=same_formats))
    return found


def _noise_of_reads(log: ValuesLog, moved: Mapping[int, Floats]) -> list[float]:
    """Return for each event how far the control moves what it reads.

    By luck one draw leaves a single number, such as a loss, where it was; it then counts as moved as far as what it was computed from.
    """
    single: dict[tuple[int, int], float] = {}
    found: list[float] = []
    for n, event in enumerate(log.events):
        reads = (
            single.get((read.event, read.output), _one(moved.get(read.event), read.output))
            for read in event.reads
            if read.event < n
        )
        found.append(max(reads, default=0.0))
        for place, output in enumerate(event.outputs):
            if math.prod(output.shape) == 1:
                single[n, place] = max(found[n], _one(moved.get(n), place))
    return found


def _carried(log: ValuesLog) -> list[float]:
    """Return for each event the rounding of what it reads, relative to its result where that only moves, casts or adds its operands.

    A sum of large values that cancel has their rounding. Everything else counts with the coarsest of its operands.
    """
    own = np.sqrt(np.array([log.numbers[log.rows(n), ROUNDING].sum() for n in range(len(log.events))]))
    norms = np.sqrt(np.maximum([log.numbers[log.rows(n), SQUARES].sum() for n in range(len(log.events))], _TINY))
    whole: Floats = own.copy()
    found: list[float] = []
    with np.errstate(invalid="ignore"):  # the norm of a mask of -inf
        for n, event in enumerate(log.events):
            reads = [one.event for one in event.reads if one.event < n]
            before = float(np.sqrt((whole[reads] ** 2).sum()))
            rescales = _rescales(event)
            adds = not rescales and (event.kind in _ONLY_READ or event.op in REARRANGES or event.kernel in _ADDS)
            share = before / norms[n] if adds else (whole[reads] / norms[reads]).max(initial=0.0)
            found.append(float(np.nan_to_num(share, nan=0.0, posinf=0.0)))
            if adds:
                whole[n] = math.hypot(own[n], before)
            if rescales:
                whole[n] = max(own[n], found[n] * norms[n])
    return found


def _rescales(event: Event) -> bool:
    """Return whether an operation multiplies a value by single numbers, so that its rounding errors stay as large relative to it."""
    if event.op == UNSCALES or event.kernel.startswith("amp_foreach"):
        return True
    return event.kernel in _RESCALES and sum(math.prod(read.part[1:]) > 1 for read in event.reads) <= 1


def _of_updates(
    a: ValuesLog, b: ValuesLog, pairs: Pairs, moved: Mapping[int, Floats], *, of_b: bool
) -> dict[int, float]:
    """Return how far the control moves the updates of all parameters of each step, because few elements decide.

    Adam's first update is the sign of the gradient. So one element whose gradient is smaller than its rounding moves a bias of 64
    elements by a quarter, and no single draw says whether it will.
    """
    found: dict[int, float] = {}
    for n, other in pairs.items():
        event = a.events[n]
        if event.kind == "update":
            noise = moved.get(other if of_b else n, np.zeros(1))
            found[event.step] = max(
                found.get(event.step, 0.0), float(np.nan_to_num(noise, posinf=0.0).max(initial=0.0))
            )
    return found


def _follows(one: Event, other: Event, found: Parting) -> bool:
    """Return whether an update with the same settings follows gradients that differ."""
    same = one.kind == "update" and _without_kernels(one) == _without_kernels(other)
    return same and any(found.distance.get(read.event, 0.0) > 0 for read in one.reads)


def _without_kernels(update: Event) -> list[str]:
    """Return an optimizer's settings but those that only choose its kernels."""
    return [setting for setting in update.settings if not setting.startswith(_KERNELS)]


def _apart(base: ValuesLog, other: ValuesLog) -> dict[int, Floats]:
    return {n: distances(base, other, n, m) for n, m in aligned(base, other).items()}


def _one(apart: Floats | None, output: int) -> float:
    return 0.0 if apart is None or output >= len(apart) else float(apart[output])


def _fitting(noise: Floats | None, apart: Floats) -> Floats:
    """Return the noise of each result; of further ones, that there is none."""
    found = np.zeros(len(apart))
    if noise is not None:
        found[: len(noise)] = noise[: len(apart)]
    return found


def _begun(log: ValuesLog, marked: set[int]) -> list[int]:
    """Return the marked events none of whose ancestors is marked."""
    tainted: set[int] = set()
    first = []
    for n, event in enumerate(log.events):
        below = any(read.event in tainted for read in event.reads)
        if n in marked and not below:
            first.append(n)
        if n in marked or below:
            tainted.add(n)
    return first


def _lasting(a: ValuesLog, far: set[int], pairs: Pairs) -> set[int]:
    """Return the events among those too far apart that lead to an outcome among them.

    Others were paired by their shapes alone: where an operation is computed in pieces, the values behind it agree again.
    """
    leads: set[int] = set()
    lasting: set[int] = set()
    for n in range(len(a.events) - 1, -1, -1):
        event = a.events[n]
        matters = n in far and (n in leads or event.kind in OUTCOMES)
        if matters:
            lasting.add(n)
        if matters or (n not in pairs and n in leads):
            leads.update(read.event for read in event.reads)
    return lasting


def _brought(a: ValuesLog, n: int, results: Mapping[int, Floats]) -> Floats:
    """Return how far each result may be because of what it reads: as far, or by as much where the result is smaller: a sum cancels."""
    relative = absolute = 0.0
    alone, known = _ancestors(a, n, results)
    for read in (read for m in (n, *alone) for read in a.events[m].reads if read.event in known):
        apart = _one(results.get(read.event), read.output)
        if apart:
            relative = max(relative, apart)
            absolute = max(
                absolute, apart * math.sqrt(max(a.numbers[a.events[read.event].row + read.output, SQUARES], 0.0))
            )
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = absolute / np.sqrt(a.numbers[a.rows(n)][:, SQUARES])
    return np.maximum(relative, np.nan_to_num(shares, nan=0.0, posinf=0.0))


def _beginnings(
    a: ValuesLog, b: ValuesLog, found: Parting, beyond: set[int], *, same_formats: bool
) -> Iterable[Beginning]:
    back = {other: n for n, other in found.pairs.items()}
    shown = not (a.outcomes_only or b.outcomes_only)
    tainted: set[int] = set()  # what is beyond rounding, and what was computed from it
    for n, event in enumerate(a.events):
        if n not in found.pairs:
            if any(read.event in tainted for read in event.reads):
                tainted.add(n)
            continue
        other = found.pairs[n]
        only_a, known_a = _ancestors(a, n, found.pairs)
        only_b, known_b = _ancestors(b, other, back)
        if (known_a | {back[m] for m in known_b} | only_a) & tainted:
            tainted.add(n)
            continue
        if n not in beyond:
            continue
        tainted.add(n)
        formats = event.outputs[0].format, b.events[other].outputs[0].format
        yield Beginning(
            a=n,
            b=other,
            distance=found.distance[n],
            allowed=found.allowed[n],
            only_a=tuple(m for m in sorted(only_a) if shown and _counts(a.events[m], casts=same_formats)),
            only_b=tuple(m for m in sorted(only_b) if shown and _counts(b.events[m], casts=same_formats)),
            settings=_settings(event, b.events[other]),
            formats=formats if same_formats and formats[0] != formats[1] else None,
            parts=_parts(a.events[n].reads, b.events[other].reads, found.pairs),
        )


def _grouped(a: ValuesLog, b: ValuesLog, beginnings: Iterable[Beginning]) -> list[Beginning]:
    """Join the beginnings that are one: updates with the same settings, gradients that one function changed, a line in every step."""
    found: dict[object, list[Beginning]] = {}
    for one in beginnings:
        event = a.events[one.a]
        whole: object = event.phase, event.module, event.line
        if event.kind in ("gradient", "update", "weight", "buffer"):
            alone = (frozenset(log.events[n].op for n in only) for log, only in ((a, one.only_a), (b, one.only_b)))
            whole = event.step, *alone
        found.setdefault((event.kind, event.op, one.settings, whole), []).append(one)
    return [replace(group[0], others=tuple(one.a for one in group[1:])) for group in found.values()]


def _ancestors(log: ValuesLog, event: int, paired: Container[int]) -> tuple[set[int], set[int]]:
    """Return the ancestors without a counterpart up to the first ones that have one, and these."""
    alone: set[int] = set()
    known: set[int] = set()
    waiting = [read.event for read in log.events[event].reads]
    while waiting:
        n = waiting.pop()
        if n in paired:
            known.add(n)
        elif n not in alone:
            alone.add(n)
            waiting += [read.event for read in log.events[n].reads]
    return alone, known


def _counts(event: Event, *, casts: bool) -> bool:
    """Return whether an operation without a counterpart may change values."""
    computes = event.kind == "operation" and event.op not in REARRANGES
    return computes or (casts and event.kind == "cast") or event.kind in (*LEAVES, "update")


def _settings(one: Event, other: Event) -> tuple[tuple[str, str], ...]:
    if one.settings == other.settings or (one.kind == "operation" and not same_function(one, other)):
        return ()
    if len(one.settings) == len(other.settings):
        return tuple((x, y) for x, y in zip(one.settings, other.settings, strict=True) if x != y)
    return ((", ".join(one.settings), ", ".join(other.settings)),)


def _parts(reads: Sequence[ValueRead], others: Sequence[ValueRead], pairs: Pairs) -> bool:
    if len(reads) != len(others):
        return False
    return any(
        pairs.get(one.event) == two.event
        and one.part
        and two.part
        and one.part != two.part
        and _size(one) == _size(two)
        for one, two in zip(reads, others, strict=True)
    )


def _size(read: ValueRead) -> int:
    return math.prod(read.part[1:])


def bits_kept(distance: float | Floats) -> Floats:
    """Return how many bits agree at a relative distance, at most 53."""
    with np.errstate(divide="ignore"):
        return np.clip(-np.log2(distance), 0.0, 53.0)
