"""The trace of a run: digests of everything its next step depends on, before every update, in a file that survives a kill."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mezzo.records import Value


class Moment(Value):
    """One entry of an optimizer's state, such as ``exp_avg``, over all parameters."""

    digest: str
    rms: float
    """Root mean square, for people."""


class OptimizerState(Value):
    """An optimizer before an update."""

    name: str
    moments: dict[str, Moment] = {}
    """By key; empty before the first update and without a state."""
    settings: list[dict[str, float]] = []
    """Learning rate and the other numbers of each parameter group."""


class ObjectState(Value):
    """A scheduler or a GradScaler: its simple values, as text."""

    name: str
    values: dict[str, str] = {}


class Point(Value):
    """The state of a training before the first forward pass of an update."""

    updates: int
    """Updates made so far, skipped ones among them."""
    weights: list[str] = []
    """Digest of each trained parameter, in the order of the optimizers."""
    names: list[str] = []
    """Names of these parameters."""
    buffers: dict[str, str] = {}
    optimizers: list[OptimizerState] = []
    schedulers: list[ObjectState] = []
    scalers: list[ObjectState] = []
    generators: dict[str, str] = {}
    """Digests of the random generators: ``python``, ``numpy``, ``torch``, devices, and those in variables."""
    samples: str = ""
    """Digest of the indices that the DataLoader drew for the batch; empty if it draws none."""
    batch: int = 0
    """Number of the batch in its pass over the loader, from 1; 0 without a loader."""
    inputs: str = ""
    """Digest of the model's inputs."""
    copies: dict[str, str] = {}
    """Digests of other weights among the variables, such as an EMA copy."""
    counters: dict[str, int] = {}
    """Integers among the variables."""


class WrittenFile(Value):
    """A file that a run has written."""

    path: str
    updates: int
    is_checkpoint: bool
    """Whether a function that saves tensors wrote it."""


@dataclass(kw_only=True)
class RunTrace:
    """The trace of one run."""

    points: dict[int, Point] = field(default_factory=dict)
    """By the number of updates made before."""
    drew: dict[int, set[str]] = field(default_factory=dict)
    """Generators that forward and backward passes drew from, by the number of updates made before."""
    written: list[WrittenFile] = field(default_factory=list)
    end: Point | None = None
    """The state at the end; None for a run that was stopped."""

    @property
    def num_updates(self) -> int:
        """The number of updates, as far as they were traced."""
        return self.end.updates if self.end is not None else max(self.points, default=0)

    def drawn_from(self, generator: str, *, after: int) -> bool:
        """Return whether forward or backward passes after this many updates drew from a generator."""
        return any(generator in names for updates, names in self.drew.items() if updates >= after)

    def moves(self, generator: str, *, after: int) -> bool:
        """Return whether a generator's state changes after this many updates, whatever draws from it."""
        states = {point.generators.get(generator) for updates, point in self.points.items() if updates >= after}
        return len(states) > 1


def read_trace(path: Path) -> RunTrace:
    """Return the trace at ``path``, without a last line that a kill has cut; an empty trace if there is no file."""
    trace = RunTrace()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return trace
    for line in lines:
        try:
            ((kind, entry),) = json.loads(line).items()
        except ValueError:
            break
        _add(trace, kind, entry)
    return trace


def _add(trace: RunTrace, kind: str, entry: Mapping[str, Any]) -> None:
    if kind == "point":
        point = Point.model_validate(entry)
        trace.points[point.updates] = point
    elif kind == "end":
        trace.end = Point.model_validate(entry)
    elif kind == "drew":
        trace.drew.setdefault(entry["updates"], set()).update(entry["generators"])
    elif kind == "wrote":
        trace.written.append(WrittenFile.model_validate(entry))


def line_of(kind: str, entry: Value | Mapping[str, Any]) -> str:
    """Return an entry as a line of the file."""
    text = entry.model_dump_json() if isinstance(entry, Value) else json.dumps(entry)
    return f'{{"{kind}": {text}}}\n'


def same_number(one: float, other: float) -> bool:
    """Return whether two numbers are equal, NaN and NaN among them."""
    return one == other or (math.isnan(one) and math.isnan(other))
