"""The verdict about a resumed run, from the traces and losses of the three runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

from mezzo.commands.resume_check.record import StateKind
from mezzo.measure.state_trace import ObjectState, OptimizerState, Point, RunTrace, same_number
from mezzo.records import MissingState, Note, ResumeVerdict

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
    without_effect: list[Note] = field(default_factory=list)


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
            Note(what=one.state, value=f"{one.name}: {one.resumed}, {one.undisturbed} undisturbed", reason=_NO_EFFECT)
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


_RANDOM_FIX = (
    "save random.getstate(), numpy.random.get_state(), torch.get_rng_state() and torch.cuda.get_rng_state_all() "
    "(and the state of a generator of your own), and restore them before the next batch"
)
_ORDER_FIX = (
    "derive the order from the epoch, so that it can be drawn again: a generator of the loader's own, seeded with the epoch before each "
    "pass; under Accelerate, DataLoaderConfiguration(use_seedable_sampler=True)"
)
_POSITION_FIX = "save how many batches of the epoch were trained on, and skip these after resuming"


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """A resumed run and the undisturbed one."""

    whole: RunTrace
    trace: RunTrace
    resumed_after: int
    """The update of the undisturbed run after which the resumed run began."""

    @property
    def pairs(self) -> list[tuple[Point, Point]]:
        """The states before the same update in both runs."""
        both = (
            (self.whole.points.get(self.resumed_after + n), point) for n, point in sorted(self.trace.points.items())
        )
        return [(then, now) for then, now in both if then is not None]

    @property
    def total(self) -> int:
        """Updates of the stopped and the resumed part together."""
        return self.resumed_after + self.trace.num_updates

    @property
    def has_all_steps(self) -> bool:
        """Whether the training has as many updates as the undisturbed one."""
        return self.total == self.whole.num_updates


def lost_position(runs: Resumed) -> Iterator[MissingState]:
    """Yield the position in the data, if the resumed run begins at another one."""
    then, now = runs.pairs[0]
    if _same_batch(then, now) or (then.batch == now.batch > 0 and runs.has_all_steps):
        return
    if not then.samples and runs.has_all_steps and other_generators(then, now):
        return  # the batch itself may be drawn at random
    trained = [n for n, point in runs.whole.points.items() if n != runs.resumed_after and _same_batch(point, now)]
    step = runs.resumed_after + 1
    if trained:
        other = max((n for n in trained if n < runs.resumed_after), default=trained[0]) + 1
        resumed, why = f"the batch of step {other}", "it has that step's samples"
    elif then.batch != now.batch:
        resumed, why = f"batch {now.batch} of its pass", f"undisturbed, it is batch {then.batch} of its pass"
    else:
        return
    yield MissingState(
        state="data position",
        name="DataLoader" if then.samples else "inputs of the model",
        undisturbed=f"the batch of step {step}",
        resumed=resumed,
        evidence=why,
        fix=_POSITION_FIX,
    )


def lost_randomness(runs: Resumed, *, has_position: bool) -> Iterator[MissingState]:
    """Yield the random generators that were not restored, if the training draws from them.

    Args:
        runs: both runs.
        has_position: whether the resumed run is at its position in the data.
    """
    then, now = runs.pairs[0]
    changed = other_generators(then, now)
    drawn = [name for name in changed if runs.whole.drawn_from(name, after=runs.resumed_after)]
    moved = [name for name in changed if runs.whole.moves(name, after=runs.resumed_after)]
    batch = first_other_batch(runs) if has_position else None
    if has_position and _other_order_of_pass(runs):
        yield _lost_order(runs)
        batch = None
    if (batch is not None and moved) or drawn:
        by_batch = batch is not None and moved
        why = f"the batch of step {batch} is another one: its order or its changes are drawn at random"
        yield MissingState(
            state="random generators",
            name=", ".join(moved if by_batch else drawn),
            undisturbed=f"as after step {runs.resumed_after}",
            resumed="another state",
            evidence=why if by_batch else "the forward pass draws from it, as dropout does",
            fix=_RANDOM_FIX,
        )
    elif batch is not None:
        yield MissingState(
            state="data order",
            name="inputs of the model",
            undisturbed=f"the batch of step {batch}",
            resumed="another batch",
            evidence="all random generators that were found are as they were",
            fix="derive the order from the epoch, or save what it is derived from",
        )


def _other_order_of_pass(runs: Resumed) -> bool:
    """Return whether the resumed run is at its place in the middle of a pass over the loader, with other samples.

    The order is drawn when the pass begins: no generator that is restored in the middle of it brings the order back.
    """
    then, now = runs.pairs[0]
    begins = min(
        (point.batch for point in runs.whole.points.values() if point.batch), default=0
    )  # a loader may read ahead
    return then.batch == now.batch > begins and bool(then.samples and now.samples) and then.samples != now.samples


def _lost_order(runs: Resumed) -> MissingState:
    then, now = runs.pairs[0]
    same = next((n for n, point in sorted(runs.whole.points.items()) if point.samples == now.samples), None)
    return MissingState(
        state="data order",
        name="DataLoader",
        undisturbed=f"the order of the pass that step {then.updates + 1} is in",
        resumed="another order" if same is None else f"the order of the pass that step {same + 1} is in",
        evidence="the batch has the same number within its pass, and other samples: the order is drawn when a pass begins, and a "
        "generator restored in mid-pass draws another",
        fix=_ORDER_FIX,
    )


def lost_counters(runs: Resumed) -> Iterator[MissingState]:
    """Yield integers of the script that count all its steps or epochs, and were not restored."""
    then, now = runs.pairs[0]
    steps = f"; {runs.total} steps in all, and {runs.whole.num_updates} undisturbed"
    for name in _counting(runs.whole):
        if name in then.counters and name in now.counters and then.counters[name] != now.counters[name]:
            yield MissingState(
                state="step counter",
                name=name,
                undisturbed=str(then.counters[name]),
                resumed=str(now.counters[name]),
                evidence=f"the variable before the first resumed update{'' if runs.has_all_steps else steps}",
                fix=f"save {name}, and set it after loading",
            )


def other_generators(then: Point, now: Point) -> list[str]:
    """Return the random generators whose states differ."""
    return [name for name, digest in then.generators.items() if now.generators.get(name) != digest]


def first_other_rate(runs: Resumed) -> tuple[int, dict[str, tuple[float, float]]]:
    """Return the first step whose learning rate or other setting differs, and what differs; 0 if none does."""
    for then, now in runs.pairs:
        found = other_rates(then, now)
        if found:
            return then.updates + 1, found
    return 0, {}


def first_other_batch(runs: Resumed) -> int | None:
    """Return the first step that trains on another batch; None if none does."""
    for then, now in runs.pairs:
        if not _same_batch(then, now) or (then.samples and then.inputs != now.inputs):
            return then.updates + 1
    return None


def _same_batch(one: Point, other: Point) -> bool:
    """Compare the samples that a loader drew, if it drew any, because transforms may change them at random; else the inputs."""
    return one.samples == other.samples if one.samples or other.samples else one.inputs == other.inputs


def _counting(trace: RunTrace) -> list[str]:
    """Return the variables that rise and never fall."""
    columns: dict[str, list[int]] = {}
    for _, point in sorted(trace.points.items()):
        for name, value in point.counters.items():
            columns.setdefault(name, []).append(value)
    return [
        name for name, values in columns.items() if values[-1] > values[0] and all(a <= b for a, b in pairwise(values))
    ]


_MOST_NAMES = 3
_FIXES: dict[StateKind, str] = {
    "weights": "save the complete model.state_dict(), and load it with strict=True",
    "buffers": "save model.state_dict(), which has the buffers, not only the parameters",
    "optimizer": "save optimizer.state_dict(), and load it after the optimizer is created",
    "learning rate": "save what the learning rate is computed from, or the optimizer's state_dict(), which has it",
    "scheduler": "save scheduler.state_dict(), and load it after the scheduler is created",
    "GradScaler": "save scaler.state_dict(), and load it after the scaler is created",
    "copy of the weights": "save the copy's state_dict() with the model's, and load it into the copy",
}


def lost_weights(names: Sequence[str], step: int) -> Iterator[MissingState]:
    """Yield the parameters that were not restored."""
    if names:
        yield _missing(
            "weights",
            _listed(names),
            f"as after step {step}",
            "other values",
            f"{len(names)} parameters differ; the others are those after step {step}",
        )


def lost_buffers(then: Point, now: Point) -> Iterator[MissingState]:
    """Yield the buffers of models that were not restored, such as BatchNorm's running statistics."""
    names = [name for name in _different(then.buffers, now.buffers) if name in now.buffers]
    if names:
        evidence = "model.eval() computes with them; training with batch statistics does not show it"
        yield _missing("buffers", _listed(names), "as trained", "other values", evidence)


def lost_optimizers(then: Point, now: Point) -> Iterator[MissingState]:
    """Yield the optimizers whose state was not restored."""
    for n, before in enumerate(then.optimizers):
        after = now.optimizers[n] if n < len(now.optimizers) else OptimizerState(name=before.name)
        keys = [key for key, moment in before.moments.items() if _digest(after, key) != moment.digest]
        if keys:
            had = ", ".join(f"{key} {before.moments[key].rms:.3g}" for key in keys)
            has = ", ".join(f"{key} {after.moments[key].rms:.3g}" for key in keys if key in after.moments)
            evidence = f"root mean squares of {_listed(keys)} before the first resumed update"
            yield _missing("optimizer", before.name, had, has or "none: it starts over", evidence)


def lost_objects(then: Point, now: Point) -> Iterator[MissingState]:
    """Yield the schedulers and GradScalers that were not restored."""
    kinds: tuple[tuple[StateKind, list[ObjectState], list[ObjectState]], ...] = (
        ("scheduler", then.schedulers, now.schedulers),
        ("GradScaler", then.scalers, now.scalers),
    )
    for state, before, after in kinds:
        for n, one in enumerate(before):
            other = after[n].values if n < len(after) else {}
            keys = _different(one.values, other)
            if keys:
                had, has = (", ".join(f"{k} {v[k]}" for k in keys if k in v) for v in (one.values, other))
                evidence = "its state before the first resumed update"
                yield _missing(state, one.name, had, has or "nothing", evidence)


def lost_copies(then: Point, now: Point) -> Iterator[MissingState]:
    """Yield copies of the weights, such as an EMA, that were not restored; what the resumed run does not have yet is left out."""
    for name, digest in then.copies.items():
        if name in now.copies and now.copies[name] != digest:
            evidence = "the variable has other values before the first resumed update"
            yield _missing("copy of the weights", name, f"as after step {then.updates}", "other values", evidence)


def other_rates(then: Point, now: Point) -> dict[str, tuple[float, float]]:
    """Return the settings of parameter groups that differ, with both values, by name."""
    found: dict[str, tuple[float, float]] = {}
    for before, after in zip(then.optimizers, now.optimizers, strict=False):
        for group, other in zip(before.settings, after.settings, strict=False):
            found |= {k: (v, other[k]) for k, v in group.items() if k in other and other[k] != v and k not in found}
    return found


def lost_rates(found: Mapping[str, tuple[float, float]], step: int) -> Iterator[MissingState]:
    """Yield the settings of optimizers that differ in a step, such as the learning rate."""
    if found:
        had, has = (", ".join(f"{k} {values[n]:.6g}" for k, values in found.items()) for n in (0, 1))
        yield _missing("learning rate", _listed([*found]), had, has, f"parameter groups before step {step}")


def _missing(state: StateKind, name: str, undisturbed: str, resumed: str, evidence: str) -> MissingState:
    return MissingState(
        state=state, name=name, undisturbed=undisturbed, resumed=resumed, evidence=evidence, fix=_FIXES[state]
    )


def _digest(state: OptimizerState, key: str) -> str:
    return state.moments[key].digest if key in state.moments else ""


def _different(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return [name for name, value in one.items() if other.get(name) != value]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
