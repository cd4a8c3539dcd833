"""The parts of a training's state, one by one: the resumed run's first state compared with that of the undisturbed run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mezzo.commands.resume_check.record import State
from mezzo.measure.state_trace import ObjectState, OptimizerState, Point
from mezzo.records import MissingState

_MOST_NAMES = 3
_FIXES: dict[State, str] = {
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
    kinds: tuple[tuple[State, list[ObjectState], list[ObjectState]], ...] = (
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


def _missing(state: State, name: str, undisturbed: str, resumed: str, evidence: str) -> MissingState:
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
