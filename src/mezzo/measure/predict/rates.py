"""Rates of one machine: for each kind of operation, a line through the seconds measured there.

``seconds = each + bytes x per_byte + work x per_flop``, by the operation's name and format, none of the three negative. A kind
that was never timed gets the rates of the nearest one, else the rates of all products or of everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from mezzo.measure.predict.tape import CostedOperation, ProductSize


class CostLine(NamedTuple):
    """The cost of one kind of operation."""

    each_s: float
    per_byte_s: float
    per_flop_s: float

    def seconds(self, operation: CostedOperation) -> float:
        """Return the seconds of ``operation``."""
        moved = operation.read_bytes + operation.written_bytes
        return self.each_s + moved * self.per_byte_s + _work(operation) * self.per_flop_s


def _work(operation: CostedOperation) -> int:
    """Return the FLOPs of a product, or the channels of a normalisation, each of which has a cost of its own."""
    return operation.flops or operation.shape.rows


class TimedOperation(NamedTuple):
    """An operation with the seconds that it took."""

    operation: CostedOperation
    seconds: float


PRODUCTS, OTHERS = "(products)", "(others)"


@dataclass(frozen=True)
class MachineRates:
    """The lines of one machine by kind of operation."""

    lines: dict[str, CostLine]
    scale: float = 1.0
    """Seconds of whole steps over the sum of their operations' seconds, without ``between_s``."""
    between_s: float = 0.0
    """Seconds between two operations, autograd's and Python's, less what timing one costs: below 0 where that is more."""

    def seconds(self, operations: Sequence[CostedOperation]) -> NDArray[np.float64]:
        """Return the seconds of each operation in a running step."""
        alone = np.array([self.line(op).seconds(op) for op in operations])
        return np.maximum(0.0, alone * self.scale + self.between_s)

    def line(self, operation: CostedOperation) -> CostLine:
        """Return the line of the operation's kind, or of its class if its kind was not timed."""
        parts = _parts_of(operation)
        kinds = (parts, parts._replace(thin=""), parts._replace(strided=""), parts._replace(large=""))
        fallbacks = (*map("".join, kinds), PRODUCTS if operation.flops else OTHERS)
        return next(self.lines[name] for name in fallbacks if name in self.lines)

    @classmethod
    def fitted(cls, timed: Sequence[TimedOperation]) -> MachineRates:
        """Return the rates that the timed operations show."""
        groups: dict[str, list[TimedOperation]] = {PRODUCTS: [], OTHERS: []}
        for one in timed:
            groups.setdefault(kind_of(one.operation), []).append(one)
            groups[PRODUCTS if one.operation.flops else OTHERS].append(one)
        return cls({kind: line_through(group) for kind, group in groups.items() if group})

    def with_steps(self, steps: Iterable[tuple[Sequence[CostedOperation], float]]) -> MachineRates:
        """Return rates whose sums match whole steps: pairs of a step's operations and its seconds."""
        rows, target = [], []
        for operations, seconds in steps:
            rows.append([sum(self.line(op).seconds(op) for op in operations) / seconds, len(operations) / seconds])
            target.append(1.0)
        columns = np.array(rows)
        unit = np.abs(columns).max(axis=0)
        scale, between = np.linalg.lstsq(columns / unit, np.array(target), rcond=None)[0] / unit
        return MachineRates(self.lines, scale=float(scale), between_s=float(between))


_MAPPED_BYTES = 32 << 20
"""Above this size glibc maps fresh pages for each result, and the system clears them; on a GPU it is far out of the L2 cache."""
_THIN = 32
"""Products with a side below this are bound by reading their operands."""


class _Parts(NamedTuple):
    """The parts of a kind's name; a part that does not matter is empty."""

    name: str
    large: str
    window: str
    strided: str
    thin: str


def kind_of(operation: CostedOperation) -> str:
    """Return the operation's kind: its name, its format, and whatever else changes its rate."""
    return "".join(_parts_of(operation))


def _parts_of(operation: CostedOperation) -> _Parts:
    shape, window = operation.shape, ""
    name, large = f"{operation.name} {operation.format}", " large" if operation.written_bytes > _MAPPED_BYTES else ""
    if operation.name.startswith("convolution"):
        if shape.products > 1:
            groups = " depthwise" if is_depthwise(shape) else " grouped"
            return _Parts(name, large, groups, " strided" if _is_strided(operation) else "", "")
        window = " pointwise" if shape.window == 1 else " window"
    sides = {"rows": shape.rows, "columns": shape.columns, "depth": shape.depth} if operation.flops else {}
    thinnest = min(sides, key=lambda side: sides[side], default="")
    is_thin = bool(sides) and 0 < sides[thinnest] <= _THIN
    return _Parts(name, large, window, "", f" thin {thinnest}" if is_thin else "")


def _is_strided(operation: CostedOperation) -> bool:
    """Return whether a convolution's input is larger than twice its output, from the bytes that it moves."""
    if operation.name == "convolution_weight_gradient":
        shape = operation.shape
        sent = shape.products * shape.rows * shape.depth * (4 if operation.format == "fp32" else 2)
        return operation.read_bytes - sent > 2 * sent
    x, y = operation.read_bytes, operation.written_bytes
    return y > 2 * x if operation.name == "convolution_input_gradient" else x > 2 * y


def is_depthwise(shape: ProductSize) -> bool:
    """Return whether a grouped convolution, or a gradient of one, has one channel a group."""
    return min(shape.rows, shape.columns) <= 1 or shape.depth <= shape.window


def line_through(timed: Sequence[TimedOperation]) -> CostLine:
    """Return the line with the least squares of relative errors."""
    seconds = np.array([one.seconds for one in timed])
    moved = np.array([one.operation.read_bytes + one.operation.written_bytes for one in timed])
    flops = np.array([_work(one.operation) for one in timed])
    columns = np.stack([np.ones(len(timed)), moved, flops], axis=1) / seconds[:, None]
    return CostLine(*_nonnegative_solution(columns, np.ones(len(timed))))


def _nonnegative_solution(columns: NDArray[np.float64], target: NDArray[np.float64]) -> list[float]:
    """Return the least-squares solution without negative entries."""
    unit = np.maximum(np.abs(columns).max(axis=0), 1e-300)  # seconds per byte are 1e-11 of seconds each
    solution, _ = nnls(columns / unit, target)
    return [float(value) for value in solution / unit]
