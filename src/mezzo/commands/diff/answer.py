"""What two logs of values say, as parts of a record. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mezzo.commands.diff.align import same_function
from mezzo.commands.diff.judge import ALWAYS_BOTH, Beginning, Parting, bits_kept
from mezzo.commands.diff.record import (
    DiffBeginning,
    DifferentBy,
    DiffOutcome,
    DiffVerdict,
    ModuleGrowth,
    PointDifference,
    ValuePair,
    ValuePlace,
)
from mezzo.observe.values.log import LEAVES, SQUARES, Event, Floats, ValuesLog
from mezzo.records import Note

_MOST_PLACES, _MOST_NAMES = 12, 3
_BAND = 0.2
"""How far a ratio of probabilities may be from 1: the clip range of PPO (Schulman et al., arXiv:1707.06347, section 6.1)."""
_SKIPPED = "the other one skipped this update, because its scaled gradients overflowed"
_SUMS_TO_ONE = 1e-2
_OPPOSITE = 2.0
"""The relative distance of vectors of one length in opposite directions."""
_WHOLE = {"gradient": "gradients", "update": "updates", "state": "statistics"}


def answer(
    a: ValuesLog, b: ValuesLog, found: Parting, *, control: ValuesLog | None, control_of_b: bool
) -> dict[str, Any]:
    """Return the parts of a record that follow from two logs."""
    if why := not_comparable(a, b, found):
        return {"verdict": "failed", "why": why}
    errors = _Errors(a, b, control if not control_of_b else None, control if control_of_b else None)
    first = None if found.first is None else _pair(a, b, *found.first, found, errors)
    return {
        "verdict": verdict_of(a, found),
        "steps": sorted({event.step for event in a.events}),
        "num_values": len(a.events),
        "num_paired": len(found.pairs),
        "num_identical": sum(apart == 0 for apart in found.distance.values()),
        "has_control": control is not None,
        "first": first,
        "beginnings": [_beginning(a, b, one, found, errors) for one in found.beginnings[:_MOST_PLACES]],
        "outcomes": list(_outcomes(a, b, found)),
        "points": list(_points(a.points, b.points)),
        "growth": list(_growth(a, found)),
        "unstable": [_place(a.events[n]) for n in found.unstable[:_MOST_PLACES]],
        "notes": list(_notes(a, b, found)),
    }


def not_comparable(a: ValuesLog, b: ValuesLog, found: Parting) -> str:
    """Return why two runs cannot be compared; empty if they can."""
    steps = [max((event.step for event in log.events), default=0) for log in (a, b)]
    if steps[0] != steps[1]:
        return f"the first run has {steps[0]} steps and the second {steps[1]}: compare {min(steps)}, with --steps {min(steps)}"
    weights = [n for n, event in enumerate(a.events) if event.kind == "weight"]
    if weights and not any(n in found.pairs for n in weights):
        return "no weight of the first run has the name or the shape of one of the second: they are different models"
    return ""


def _notes(a: ValuesLog, b: ValuesLog, found: Parting) -> Iterable[Note]:
    for log, other, only, run in ((a, b, found.only_a, "first"), (b, a, found.only_b, "second")):
        for kind in ALWAYS_BOTH:
            of_kind = [log.events[n] for n in only if log.events[n].kind == kind]
            names = list(dict.fromkeys(event.module or event.op for event in of_kind))
            skipped = all(event.step in other.skipped for event in of_kind)
            if names:
                yield Note(
                    what=f"{kind}s of {first_names(names)}",
                    value=f"only in the {run} run",
                    reason=_SKIPPED if skipped else "the other one has none in this step",
                )
    for log, run in ((a, "first"), (b, "second")):
        for what, why in log.problems.items():
            yield Note(what=what, value=f"not compared in the {run} run", reason=why)
        if "ranks" in log.environment:
            yield Note(what=f"processes of the {run} run", value="rank 0 alone", reason=log.environment["ranks"])


def first_names(names: Sequence[str]) -> str:
    """Return the first of several names, and how many more there are."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def verdict_of(a: ValuesLog, found: Parting) -> DiffVerdict:
    """Return the verdict on two runs."""
    kinds = {a.events[one.a].kind for one in found.beginnings}
    if found.beginnings:
        first = a.events[found.beginnings[0].a]
        if kinds & {"weight", "buffer"} and first.step == 1 and first.kind in LEAVES:
            return "different weights"
        return "different data" if first.kind == "data" else "beyond rounding"
    if found.only_a or found.only_b:
        return "beyond rounding"
    if found.identical:
        return "identical"
    return "not repeatable" if found.unstable else "rounding"


class _Errors:
    """The errors of events against FP64: a run's own, or its control's."""

    def __init__(self, a: ValuesLog, b: ValuesLog, control_a: ValuesLog | None, control_b: ValuesLog | None) -> None:
        self._of = {id(a): control_a, id(b): control_b}

    def of(self, log: ValuesLog, event: int) -> float | None:
        """Return the error of an event; None if it is unknown."""
        known = log.events[event].error
        control = self._of[id(log)]
        if known is None and control is not None and event < len(control.events):
            same = control.events[event]
            known = same.error if (same.op, same.module) == (log.events[event].op, log.events[event].module) else None
        return known if known is not None and math.isfinite(known) else None


def _place(event: Event) -> ValuePlace:
    return ValuePlace(
        op=event.op,
        module=event.module,
        phase=event.phase,
        step=event.step,
        line=event.line,
        format=event.outputs[0].format if event.outputs else "",
    )


def _pair(a: ValuesLog, b: ValuesLog, n: int, other: int, found: Parting, errors: _Errors) -> ValuePair:
    return ValuePair(
        a=_place(a.events[n]),
        b=_place(b.events[other]),
        distance=found.distance[n],
        allowed=found.allowed[n],
        error_a=errors.of(a, n),
        error_b=errors.of(b, other),
    )


def _beginning(a: ValuesLog, b: ValuesLog, one: Beginning, found: Parting, errors: _Errors) -> DiffBeginning:
    pair = _pair(a, b, one.a, one.b, found, errors)
    return DiffBeginning(
        **pair.model_dump(),
        by=_by(a, b, one),
        settings=list(one.settings),
        only_a=[_place(a.events[n]) for n in one.only_a[-_MOST_PLACES:]],
        only_b=[_place(b.events[n]) for n in one.only_b[-_MOST_PLACES:]],
        num_alike=len(one.others),
        explains=None if a.outcomes_only or b.outcomes_only else _explains(a, one, found),
    )


def _explains(a: ValuesLog, one: Beginning, found: Parting) -> float | None:
    """Return the share of the final difference that lies in what is computed from where a difference begins.

    Final are the compare points of the last step, else its updates, else its loss. None if these are equal or infinitely far apart.
    """
    last = max(a.events[n].step for n in found.pairs)
    after = _following(a, {one.a, *one.others})
    for kind in ("point", "update", "loss"):
        events = [n for n in found.pairs if (a.events[n].kind, a.events[n].step) == (kind, last)]
        if events:
            whole = whole_distance(a, events, found)
            rest = together(a, {n: found.distance[n] if n in after else 0.0 for n in events})
            return (rest / whole) ** 2 if 0 < whole < math.inf else None
    return None


def _following(log: ValuesLog, events: set[int]) -> set[int]:
    """Return events, and all that are computed from them."""
    found = set(events)
    for n, event in enumerate(log.events):
        if any(read.event in found for read in event.reads):
            found.add(n)
    return found


def _by(a: ValuesLog, b: ValuesLog, one: Beginning) -> DifferentBy:
    event = a.events[one.a]
    drawn = (event, *(a.events[n] for n in one.only_a), *(b.events[n] for n in one.only_b))
    if event.kind in LEAVES:
        return "start"
    if one.settings:
        return "settings"
    if any(other.draws for other in drawn):
        return "random numbers"
    if one.only_a or one.only_b or not same_function(event, b.events[one.b]):
        return "operations"
    if one.formats is not None:
        return "format"
    return "part" if one.parts else "values"


def _outcomes(a: ValuesLog, b: ValuesLog, found: Parting) -> Iterable[DiffOutcome]:
    """Yield losses, and all gradients, updates and statistics of a step taken together."""
    for n in found.pairs:
        event = a.events[n]
        if event.kind == "loss":
            yield DiffOutcome(what="loss", step=event.step, distance=found.distance[n], allowed=found.allowed[n])
    for kind, name in _WHOLE.items():
        for step in sorted({event.step for event in a.events if event.kind == kind}):
            of_step = [n for n in found.pairs if (a.events[n].kind, a.events[n].step) == (kind, step)]
            if of_step:
                allowed = together(a, {n: min(found.allowed[n], _OPPOSITE) for n in of_step})
                yield DiffOutcome(what=name, step=step, distance=whole_distance(a, of_step, found), allowed=allowed)


def whole_distance(a: ValuesLog, events: Iterable[int], found: Parting) -> float:
    """Return the relative distance of the results of several events taken together."""
    return together(a, {n: found.distance[n] for n in events})


def together(a: ValuesLog, shares: Mapping[int, float]) -> float:
    """Return the relative size of several vectors in one, from each one's relative size."""
    squares = {n: float(a.numbers[a.rows(n)][:, SQUARES].sum()) for n in shares}
    whole = sum(squares.values())
    if not whole:
        return max(shares.values(), default=0.0)
    return math.sqrt(sum(shares[n] ** 2 * squares[n] for n in shares) / whole)


def final_distance(a: ValuesLog, b: ValuesLog, found: Parting) -> float:
    """Return how far the second run is from where it should be, in what the first step leads to.

    That is the distance between values of one name in the second run, if it has any: generation from training. Else it is the distance
    from the first run: in its compare points, else in its gradients, else in its loss.
    """
    within = [one.distance for one in _within(b.points, "")]
    if within:
        return max(within)
    for kind in ("point", "gradient", "loss"):
        events = [n for n in found.pairs if (a.events[n].kind, a.events[n].step) == (kind, 1)]
        if events:
            return whole_distance(a, events, found)
    return max(found.distance.values(), default=0.0)


def _growth(a: ValuesLog, found: Parting) -> Iterable[ModuleGrowth]:
    """Yield the bits that agree where each module ends, step by step, in the order of the run."""
    last: dict[tuple[int, str, str], int] = {}
    for n in found.pairs:
        event = a.events[n]
        if event.kind == "operation" and any("fp" in o.format or "bf" in o.format for o in event.outputs):
            last.pop((event.step, event.phase, event.module), None)
            last[event.step, event.phase, event.module] = n
    for (step, phase, module), n in last.items():
        bits, explained = bits_kept(np.array([found.distance[n], found.allowed[n]])).tolist()
        yield ModuleGrowth(module=module, phase=phase, step=step, bits=bits, explained_bits=explained)


# --- compare points ------------------------------------------------------------------------------------------------------------------


def _points(a: Mapping[str, Floats], b: Mapping[str, Floats]) -> Iterable[PointDifference]:
    for key in a:
        name, _, number = key.rpartition("#")
        if key in b and a[key].shape == b[key].shape:
            yield compare_values(name, "both runs" if number == "1" else f"both runs, value {number}", a[key], b[key])
    yield from (*_within(a, "the first run"), *_within(b, "the second run"))


def _within(values: Mapping[str, Floats], run: str) -> Iterable[PointDifference]:
    for key in values:
        name, _, number = key.rpartition("#")
        first = values[f"{name}#1"]
        if number != "1" and first.shape == values[key].shape:
            yield compare_values(name, f"values 1 and {number} of {run}", first, values[key])


def compare_values(name: str, against: str, a: Floats, b: Floats) -> PointDifference:
    """Compare two values of one name; where they can be log-probabilities, as such."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        whole = max(float(np.linalg.norm(a)), float(np.linalg.norm(b)))
        apart = float(np.linalg.norm(a - b)) if whole else 0.0
        distance = apart / whole if whole and math.isfinite(apart) else (0.0 if not whole else math.inf)
        could_be = bool(a.size) and bool((a <= 1e-3).all()) and bool((b <= 1e-3).all()) and bool(np.isfinite(a).all())
        if not could_be:
            return PointDifference(name=name, against=against, distance=distance)
        sums = np.exp(a).sum(axis=-1) if a.ndim else np.zeros(1)
        rows = a.ndim > 0 and a.shape[-1] > 1 and bool((abs(sums - 1) < _SUMS_TO_ONE).all())
        ahead = b - a
        # Adding what the rows lack of 1 keeps the divergence above 0 where they sum to 1 only up to rounding.
        whole_rows = (np.exp(a) * (a - b) - np.exp(a) + np.exp(b)).sum(axis=-1)
        kl = float(whole_rows.mean()) if rows else float((np.exp(ahead) - 1 - ahead).mean())
        outside = float((abs(np.exp(ahead) - 1) > _BAND).mean())
    return PointDifference(
        name=name, against=against, distance=distance, is_log_probabilities=rows, kl=kl, outside=outside, band=_BAND
    )
