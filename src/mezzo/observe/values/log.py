"""The values of a run's first steps as events and fingerprints, in one file. Imports no torch.

A *fingerprint* has a hash of the bits, the norm, and a sketch: 64 sums of the elements, each with a fixed random sign. The distance of two
sketches estimates the distance of the tensors with a standard deviation of 9%; its square is unbiased (Charikar, Chen and Farach-Colton,
"Finding frequent items in data streams", 2002: the count sketch; the variance follows from theirs). Tensors of up to 64 elements are
compared exactly. Values whose elements may have any order have no sketch; they are compared by their sums of squares and fourth powers.
Cost: 67 numbers a tensor.

Events form a graph: each knows which events made what it reads. A value that no event made is an event of its own: a weight, a buffer, a
constant or data.
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from mezzo.errors import RecordError

Floats: TypeAlias = npt.NDArray[np.float64]

BUCKETS = 64
"""Numbers in a sketch."""
SQUARES, ROUNDING, FOURTHS, SKETCH = 0, 1, 2, 3
"""Where a fingerprint has the sum of squares, the sum of squares of the rounding that its format explains, the sum of fourth powers, and
where its sketch begins."""
NUMBERS = BUCKETS + SKETCH
NO_COUNTERPART = -1.0
"""A negative number in place of a sum of squares: the value has no counterpart."""
UNSCALES = "unscale"
"""The name of the operation that divides a gradient by the loss scale."""
VALUES_NAME = "values.npz"
"""The file beside a run's record."""
_VERSION = 1

Phase: TypeAlias = Literal["forward", "backward", "gradients", "update"]
"""``gradients``: what a script does with gradients between a backward pass and an update, such as reducing and clipping them."""
EventKind: TypeAlias = Literal[
    "operation",
    "cast",
    "weight",
    "buffer",
    "constant",
    "data",
    "loss",
    "gradient",
    "update",
    "state",
    "point",
]
LEAVES: tuple[EventKind, ...] = ("weight", "buffer", "constant", "data")
"""Values that no event made."""
OUTCOMES: tuple[EventKind, ...] = ("loss", "gradient", "update", "state", "point")
"""What a training is for: a difference that reaches none of these does not matter."""


@dataclass(frozen=True, slots=True)
class ValueRead:
    """What an event reads."""

    event: int
    output: int
    """Which of its results."""
    part: tuple[int, ...]
    """The offset and the shape of the part of it that is read."""


@dataclass(frozen=True, slots=True)
class Output:
    """A result."""

    format: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that made a value."""

    kind: EventKind
    step: int
    phase: Phase
    op: str
    """Torch's public name of an operation; the name of a compare point; an optimizer's class."""
    module: str
    """The path of the module, or a parameter's."""
    line: str
    """The script's line (``file:line``)."""
    settings: tuple[str, ...] = ()
    """The arguments that are not tensors; an optimizer's settings."""
    reads: tuple[ValueRead, ...] = ()
    outputs: tuple[Output, ...] = ()
    row: int = -1
    """The row of its first result's fingerprint; the others follow."""
    draws: bool = False
    """Whether it draws random numbers."""
    kernel: str = ""
    """The dispatcher's name of an operation; in a backward pass ``op`` has the name of what is differentiated."""
    flops: int = 0
    """FLOPs of a matrix product or convolution."""
    error: float | None = None
    """The relative distance of its results from those in FP64 on the same operands; None if that was not computed."""
    loss_scale: float = 1.0
    """The loss scale of the backward pass that it is in: most results there are multiplied by it."""


@dataclass
class ValuesLog:
    """All events of a run's first steps, in the order in which they ran."""

    events: list[Event] = field(default_factory=list)
    hashes: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    numbers: Floats = field(default_factory=lambda: np.zeros((0, NUMBERS)))
    """One row for each fingerprint."""
    points: dict[str, Floats] = field(default_factory=dict)
    """The values at compare points, by ``name#number``."""
    environment: dict[str, str] = field(default_factory=dict)
    """Device and versions."""
    problems: dict[str, str] = field(default_factory=dict)
    """Operations and compare points that are not among the events, and why."""
    outcomes_only: bool = False
    """Whether no operation is among the events: compiled code hides them."""
    skipped: tuple[int, ...] = ()
    """Steps whose updates were skipped, because scaled gradients overflowed."""

    def rows(self, event: int) -> slice:
        """Return the rows of an event's fingerprints."""
        known = self.events[event]
        return slice(known.row, known.row + len(known.outputs))

    def save(self, path: Path) -> None:
        """Write the log to a file, which appears once it is whole."""
        meta = {
            "version": _VERSION,
            "events": [asdict(event) for event in self.events],
            "environment": self.environment,
            "points": list(self.points),
            "problems": self.problems,
            "outcomes_only": self.outcomes_only,
            "skipped": self.skipped,
        }
        arrays = {f"point_{n}": values for n, values in enumerate(self.points.values())}
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_suffix(".part.npz")
        text = np.frombuffer(json.dumps(meta).encode(), np.uint8)
        np.savez_compressed(whole, meta=text, hashes=self.hashes, numbers=self.numbers, **arrays)  # type: ignore[arg-type]
        whole.replace(path)

    @classmethod
    def load(cls, path: Path) -> ValuesLog:
        """Read a log.

        Raises:
            RecordError: there is none, or another version of Mezzo wrote it.
        """
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                meta = json.loads(stored["meta"].tobytes())
                points = {name: stored[f"point_{n}"] for n, name in enumerate(meta["points"])}
                hashes, numbers = stored["hashes"], stored["numbers"]
        except OSError:
            raise RecordError(
                f"there are no fingerprints at {path}",
                hint="type: mezzo run --fingerprints train.py",
            ) from None
        except (ValueError, KeyError, EOFError, BadZipFile, zlib.error) as error:
            raise RecordError(f"{path} is not a file of fingerprints: {error}", hint="record them again") from None
        if meta["version"] != _VERSION:
            raise RecordError(
                f"{path} has fingerprints of version {meta['version']}; this Mezzo reads version {_VERSION}",
                hint="record both runs with one version of Mezzo",
            )
        events = [_event(one) for one in meta["events"]]
        rest = meta["environment"], meta["problems"], meta["outcomes_only"], tuple(meta["skipped"])
        return cls(events, hashes, numbers, points, *rest)


def _event(fields: dict[str, Any]) -> Event:
    reads = tuple(ValueRead(one["event"], one["output"], tuple(one["part"])) for one in fields["reads"])
    outputs = tuple(Output(one["format"], tuple(one["shape"])) for one in fields["outputs"])
    return replace(
        Event(**{**fields, "reads": (), "outputs": ()}),
        settings=tuple(fields["settings"]),
        reads=reads,
        outputs=outputs,
    )


def distances(a: ValuesLog, b: ValuesLog, one: int, other: int) -> Floats:
    """Return the relative distance of each result of the first event from the second event's.

    0 if all bits are equal; infinite if one is not finite where the other is, or if the first results differ in their shapes. Where a
    sketch is missing (NaN), the distance of the norms. A further result that only one event has, such as a mean that is kept for the
    backward pass, counts as equal. Where the loss scales differ, a result counts as scaled or not, whichever brings both nearer: a
    recomputed value is not scaled.
    """
    left, right = a.events[one].outputs, b.events[other].outputs
    alike = [n < len(right) and rows_of(x.shape) == rows_of(right[n].shape) for n, x in enumerate(left)]
    if not all(alike[:1]):
        return np.full(len(left), np.inf)
    apart = np.zeros(len(left))
    known = np.flatnonzero(alike)
    formats = np.array([left[n].format == right[n].format for n in known], bool)
    rows, others = a.rows(one).start + known, b.rows(other).start + known
    same = (a.hashes[rows] == b.hashes[others]) & formats
    if not same.all():
        apart[known] = np.where(same, 0.0, _relative(a.numbers[rows], b.numbers[others]))
        scales = a.events[one].loss_scale, b.events[other].loss_scale
        if scales[0] != scales[1]:
            unscaled = _relative(_divided(a.numbers[rows], scales[0]), _divided(b.numbers[others], scales[1]))
            apart[known] = np.minimum(apart[known], unscaled)
    return apart


def rows_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return a shape with all dimensions but the last in one: a batched product has them so, or apart."""
    return math.prod(shape[:-1]), math.prod(shape[-1:])


def _divided(numbers: Floats, by: float) -> Floats:
    """Return the fingerprints of values divided by a number; exact for a power of two."""
    powers = np.ones(NUMBERS)
    powers[[SQUARES, ROUNDING, FOURTHS]] = 2, 2, 4
    return np.where(numbers[:, [SQUARES]] < 0, numbers, numbers / by**powers)  # negative: no counterpart


def _relative(first: Floats, second: Floats) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        apart = np.sqrt(((first[:, SKETCH:] - second[:, SKETCH:]) ** 2).sum(axis=1))
        whole = np.sqrt(np.maximum(first[:, SQUARES], second[:, SQUARES]))
        unordered = np.isnan(first[:, SKETCH]) | np.isnan(second[:, SKETCH])
        finite = np.isfinite(first[:, SQUARES]) & np.isfinite(second[:, SQUARES])
        apart = np.where(unordered & finite, _unordered(first, second) * whole, apart)
        unknown = (first[:, SQUARES] < 0) | (second[:, SQUARES] < 0)
        relative = np.where(unknown | (apart == 0), 0.0, apart / whole)
    return np.nan_to_num(relative, nan=np.inf)


def _unordered(first: Floats, second: Floats) -> Floats:
    """Return the relative distance of the norms, or of the roots of the sums of fourth powers: normalised values have one norm."""
    kinds = ((SQUARES, 1 / 2), (FOURTHS, 1 / 4))
    roots = [(first[:, place] ** power, second[:, place] ** power) for place, power in kinds]
    return np.maximum(*(np.abs(x - y) / np.maximum(x, y) for x, y in roots))


def rounding(log: ValuesLog, event: int) -> Floats:
    """Return the relative rounding that the format of each result explains."""
    rows = log.numbers[log.rows(event)]
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = np.sqrt(rows[:, ROUNDING] / rows[:, SQUARES])
    return np.nan_to_num(shares, nan=0.0, posinf=0.0)
