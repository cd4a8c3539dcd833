"""State whose loss shows only in later steps: the position in the data, random numbers, and a script's own counters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from mezzo.commands.resume_check.restored import other_rates
from mezzo.measure.state_trace import Point, RunTrace
from mezzo.records import MissingState

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
        resumed, why = f"the batch of step {other}", "its samples are those of that step"
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
        evidence="the batch has the same number within its pass, and other samples: the order is drawn when a pass begins, so a generator "
        "that is restored in the middle of one draws another",
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
