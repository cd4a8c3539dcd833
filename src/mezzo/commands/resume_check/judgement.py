"""The verdict about a resumed run, from the traces and losses of the three runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from mezzo.commands.resume_check.progress import (
    Resumed,
    first_other_rate,
    lost_counters,
    lost_position,
    lost_randomness,
)
from mezzo.commands.resume_check.restored import (
    lost_buffers,
    lost_copies,
    lost_objects,
    lost_optimizers,
    lost_rates,
    lost_weights,
)
from mezzo.measure.state_trace import Point, RunTrace, same_number
from mezzo.records import MissingState, Reason, ResumeVerdict

_NO_EFFECT = "no loss and no weight depended on it"


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The traces and losses of the three runs."""

    whole: RunTrace
    stopped: RunTrace
    resumed: RunTrace
    whole_losses: Sequence[float]
    resumed_losses: Sequence[float]
    stopped_after: int
    error: str | None = None
    """Why the resumed run failed, if it did."""
    checkpoints: Sequence[str] = ()
    """Files with state, or folders of them, that the stopped run left."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The verdict and its basis."""

    verdict: ResumeVerdict
    why: str
    resumed_at: int | None = None
    first_difference: int | None = None
    missing: list[MissingState] = field(default_factory=list)
    without_effect: list[Reason] = field(default_factory=list)


def judged(runs: Runs) -> Judgement:
    """Return the verdict."""
    step = first_unlike(runs.whole, runs.stopped, until=runs.stopped_after)
    if step is not None:
        why = f"the script is not reproducible: two runs with the same seeds differ at step {step}, before any stop"
        return Judgement(verdict="undecided", why=why)
    if runs.error is not None and runs.checkpoints:
        return Judgement(verdict="does_not_resume", why=f"started again, it failed: {runs.error}")
    if not runs.resumed.points:
        return _not_resumed(runs, "started again, it ran no step")
    first = runs.resumed.points[min(runs.resumed.points)]
    start = start_of(runs.whole, first, latest=runs.stopped_after)
    if start is None:
        return _not_resumed(runs, "its first weights match no step of the undisturbed run")
    if start.updates == 0:
        return _not_resumed(runs, "started again, it begins with the weights from before step 1")
    pair = Resumed(whole=runs.whole, trace=runs.resumed, resumed_after=start.updates)
    return _compared(runs, pair, start.other_weights)


def first_unlike(whole: RunTrace, again: RunTrace, *, until: int) -> int | None:
    """Return the first step before which two runs differ in weights, buffers or batch; None if none does."""
    for updates, point in sorted(again.points.items()):
        then = whole.points.get(updates)
        if updates < until and then is not None and _trained_on(then) != _trained_on(point):
            return max(updates, 1)
    return None


def _trained_on(point: Point) -> tuple[object, ...]:
    return point.weights, point.buffers, point.samples, point.inputs


def _not_resumed(runs: Runs, why: str) -> Judgement:
    if runs.checkpoints:
        return Judgement(verdict="does_not_resume", why=why)
    late = [one.updates for one in runs.whole.written if one.is_checkpoint]
    when = f"; undisturbed, it first writes one after step {min(late)} of {runs.whole.num_updates}" if late else ""
    return Judgement(
        verdict="no_checkpoint",
        why=f"it wrote no file with state before it was stopped after step {runs.stopped_after}{when}",
    )


def _compared(runs: Runs, pair: Resumed, other_weights: Sequence[str]) -> Judgement:
    difference = _first_difference(runs, pair)
    then, now = pair.pairs[0]
    restored = [
        *lost_weights(other_weights, pair.resumed_after),
        *lost_optimizers(then, now),
        *lost_objects(then, now),
        *lost_buffers(then, now),
        *lost_copies(then, now),
    ]
    progress = [] if _same_course(difference, pair) else list(_lost_progress(pair, restored))
    missing = [*restored, *progress]
    harmless = [one for one in _all_progress(pair) if one not in progress]
    failed = "" if runs.error is None else f"; it then failed: {runs.error}"
    if not missing and _same_course(difference, pair) and not failed and _same_end(runs):
        why = f"resumed after step {pair.resumed_after}, it ran the same {runs.resumed.num_updates} steps, bit for bit"
        without_effect = [
            Reason(what=one.state, value=f"{one.name}: {one.resumed}, {one.undisturbed} undisturbed", reason=_NO_EFFECT)
            for one in harmless
        ]
        return Judgement(verdict="exact", why=why, resumed_at=pair.resumed_after, without_effect=without_effect)
    if not missing:
        missing = [_unknown(difference, pair)]
    named = ", ".join(dict.fromkeys(one.state for one in missing))
    return Judgement(
        verdict="differs",
        why=f"resumed after step {pair.resumed_after}, without the right {named}{failed}",
        resumed_at=pair.resumed_after,
        first_difference=difference,
        missing=missing,
    )


def _lost_progress(pair: Resumed, restored: Sequence[MissingState]) -> Iterator[MissingState]:
    """Yield lost state that shows as the training continues, unless ``restored`` explains it.

    A learning rate or a batch that a script computes from a counter is a consequence of the counter.
    """
    position = list(lost_position(pair))
    random = list(lost_randomness(pair, has_position=not position))
    explained = any(one.state in ("scheduler", "optimizer") for one in restored)
    step, rates = first_other_rate(pair)
    by_loader = bool(position) and pair.pairs[0][0].batch > 0
    too_many = not pair.has_all_steps and not by_loader
    counters = list(lost_counters(pair))
    if counters and ((rates and not explained) or too_many or not (position or random or restored)):
        yield from counters
        yield from position if by_loader else ()
        yield from random
        return
    yield from position
    yield from random
    if not explained:
        yield from lost_rates(rates, step)


def _all_progress(pair: Resumed) -> list[MissingState]:
    position = list(lost_position(pair))
    return [*position, *lost_randomness(pair, has_position=not position), *lost_counters(pair)]


def _first_difference(runs: Runs, pair: Resumed) -> int | None:
    """Return the first step whose loss differs, or whose weights do after it."""
    losses = zip(runs.resumed_losses, runs.whole_losses[pair.resumed_after :], strict=False)
    steps = [pair.resumed_after + n for n, (now, then) in enumerate(losses, start=1) if not same_number(now, then)]
    weights = [
        then.updates for then, now in pair.pairs[1:] if then.weights != now.weights or then.buffers != now.buffers
    ]
    return min([*steps, *weights], default=None)


def _same_course(difference: int | None, pair: Resumed) -> bool:
    return difference is None and pair.has_all_steps


def _same_end(runs: Runs) -> bool:
    """Return whether weights, buffers and copies are the same at the end."""
    whole, resumed = runs.whole.end, runs.resumed.end
    if whole is None or resumed is None:
        return False
    return (whole.weights, whole.buffers, whole.copies) == (resumed.weights, resumed.buffers, resumed.copies)


def _unknown(difference: int | None, pair: Resumed) -> MissingState:
    if difference is None and pair.has_all_steps:
        where = "the weights at the end"
    elif difference is None:
        where = f"the number of steps: {pair.total} in all, and {pair.whole.num_updates} undisturbed"
    else:
        where = f"step {difference}"
    return MissingState(
        state="unknown",
        name="state outside of what was found",
        undisturbed="",
        resumed="",
        evidence=f"the first difference is in {where}; weights, optimizers, schedulers, scaler, buffers and generators are as they were",
        fix="look for other state that changes from step to step: attributes of modules, state in data sets",
    )


# --- Where a resumed run began: the update of the undisturbed run whose state it has --------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ResumedStart:
    """Where a resumed run began."""

    updates: int
    """Updates of the undisturbed run that its first state corresponds to."""
    other_weights: tuple[str, ...] = ()
    """Parameters that are not what they were then."""


def start_of(whole: RunTrace, first: Point, *, latest: int) -> ResumedStart | None:
    """Return where a run began whose first state is ``first``; None if its weights match no step.

    Args:
        whole: the undisturbed run.
        first: the first state of the resumed run.
        latest: the update that the run was stopped after, which no checkpoint can be far beyond.
    """
    if not whole.points:
        return None
    beginning = whole.points[min(whole.points)]

    def rank(point: Point) -> tuple[int, int, int]:
        near = -abs(latest - point.updates)
        return _weights_alike(point, first, beginning), _others_alike(point, first), near

    best = max(whole.points.values(), key=rank)
    pairs = zip_longest(best.names, best.weights, first.weights)
    other = tuple(name for name, then, now in pairs if then is not None and then != now)
    if other and not _weights_alike(best, first, beginning):
        return None
    return ResumedStart(updates=best.updates, other_weights=other)


def _weights_alike(point: Point, first: Point, beginning: Point) -> int:
    """Return how many parameters are alike; of those that training had not changed by then, only if all are alike."""
    if point.weights == first.weights:
        return len(point.weights) + 1
    return sum(
        now == then and then != before
        for now, then, before in zip(first.weights, point.weights, beginning.weights, strict=False)
    )


def _others_alike(point: Point, first: Point) -> int:
    """Return how many other parts of the state are alike: a learning rate of 0 leaves weights as they are for many steps."""
    parts = ("optimizers", "schedulers", "scalers", "buffers", "copies", "samples", "inputs")
    return sum(getattr(point, part) == getattr(first, part) for part in parts)
