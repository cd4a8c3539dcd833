"""Rows of public throughput tables, priced together, and the fit of the constants on them."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from benchmarks.prediction.zoo.named import NotBuilt, Row, row_of
from mezzo.gpus import Gpu, find_gpu
from mezzo.measure.predict.time import Array, Card, Columns, Constants, family, longer_of, operation_bounds

SAME_AS = {"MI250 (1 GCD)": "MI210", "V100-SXM3-32GB": "V100-SXM2-32GB"}
"""GPUs with another name in the table of GPUs: half an MI250 is an MI210."""
PRIOR = {
    "half": 0.3,
    "tf32": 0.3,
    "fp32": 0.3,
    "depthwise": 0.7,
    "grouped": 0.7,
    "bandwidth": 0.2,
    "layout_copies": 0.5,
    "norm_passes": 0.4,
    "l2_share": 0.5,
    "overlap": 0.1,
    "depth_latency": 0.6,
    "latency_s": 0.3,
    "feed_bytes": 0.5,
    "winograd": 0.2,
    "block_elements": 0.4,
    "issue_bytes": 0.5,
    "waiting": 0.3,
    "full_clock_w": 0.2,
    "old_libraries": 0.1,
}
"""The expected distance of each constant from the start of the fit: the standard deviation of its logarithm."""
SHARES = ("half", "tf32", "fp32", "bandwidth")


@dataclass(frozen=True)
class Measured:
    """A row that can be predicted."""

    cells: dict[str, str]
    row: Row
    kind: str
    gpu: Gpu
    ops: Columns
    """Different operations."""
    counts: Array
    """How often each operation runs."""
    seconds: float

    @property
    def family(self) -> str:
        """The group of architectures with which the row is held out."""
        return family(self.gpu.architecture)

    @property
    def old(self) -> bool:
        """Whether the row's matrix units were driven by libraries before 2022."""
        found = re.search(r"NGC PyTorch 1\.(\d+)", self.cells["framework"])
        return found is not None and int(found.group(1)) < 12 and self.row.precision != "fp32"

    @property
    def setting(self) -> tuple[str, ...]:
        """The facts that repeated measurements share."""
        return self.cells["model"], self.gpu.name, self.row.precision, self.row.layout


def read(path: Path, cache: Path | None) -> tuple[list[Measured], Counter[str]]:
    """Return the rows of a table that can be predicted, and the number of other rows by reason."""
    rows, reasons = [], Counter[str]()
    priced: dict[tuple[Row, int], tuple[Columns, Array]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for cells in csv.DictReader(file):
            gpu = find_gpu(SAME_AS.get(cells["gpu"], cells["gpu"]))
            try:
                if gpu is None:
                    raise NotBuilt(f"no facts about the GPU {cells['gpu']}")
                row, batch, kind = row_of(cells)
                key = row.recorded, batch
                if key not in priced:
                    priced[key] = merged(Columns.of(row.tape(batch, cache).operations))
            except NotBuilt as error:
                reasons[str(error)] += 1
                continue
            rows.append(Measured(cells, row, kind, gpu, *priced[key], batch / float(cells["throughput_per_gpu"])))
    return rows, reasons


def merged(columns: Columns) -> tuple[Columns, Array]:
    """Return the different operations among ``columns``, and how often each of them occurs."""
    own = {f.name: getattr(columns, f.name) for f in fields(Columns)}
    table = np.stack([column.astype(np.float64) for column in own.values()], axis=1)
    rows, counts = np.unique(table, axis=0, return_counts=True)
    found = {name: row.astype(own[name].dtype) for name, row in zip(own, rows.T, strict=True)}
    return Columns(**found), counts.astype(np.float64)


class Joint:
    """All operations of many rows as one set of columns, so that one pass prices all rows."""

    def __init__(self, rows: Sequence[Measured]) -> None:
        """Join the rows."""
        sizes = [len(row.ops.flops) for row in rows]
        self.at = np.cumsum([0, *sizes[:-1]])
        self.ops = Columns(**{f.name: np.concatenate([getattr(r.ops, f.name) for r in rows]) for f in fields(Columns)})
        cards = [
            # The scripts of all tables with convolutions set cudnn.benchmark: NVIDIA's and Lambda's examples, and timm's
            Card.of(r.gpu, tf32=r.row.precision != "fp32", channels_last=r.row.layout == "nhwc", tries_algorithms=True)
            for r in rows
        ]
        self.card = Card(**{f.name: np.repeat([getattr(c, f.name) for c in cards], sizes) for f in fields(Card)})
        self.old = np.array([row.old for row in rows])
        self.counts = np.concatenate([row.counts for row in rows])
        self.kernels = np.array([row.counts.sum() for row in rows])

    def seconds(self, constants: Constants) -> Array:
        """Return the predicted seconds of each row."""
        device = np.add.reduceat(self.counts * operation_bounds(self.ops, self.card, constants).total, self.at)
        found: Array = longer_of(device, self.kernels * constants.launch_s)
        return found * np.where(self.old, constants.old_libraries, 1.0)


def fit(rows: Sequence[Measured]) -> Constants:
    """Return constants fitted on ``rows``: least squares of logarithms, with outliers damped and repeats sharing one weight."""
    start, joint = Constants(), Joint(rows)
    names = list(PRIOR)
    repeats = Counter(row.setting for row in rows)
    weights = np.array([repeats[row.setting] ** -0.5 for row in rows]) / 0.1
    wanted, width = np.log([row.seconds for row in rows]), np.array([PRIOR[name] for name in names])

    def moved(theta: Array) -> Constants:
        return replace(start, **{n: getattr(start, n) * float(np.exp(v)) for n, v in zip(names, theta, strict=True)})

    def errors(theta: Array) -> Array:
        return np.concatenate([weights * (np.log(joint.seconds(moved(theta))) - wanted), theta / width])

    top = [float(np.log(0.98 / getattr(start, name))) if name in SHARES else np.inf for name in names]
    found = least_squares(
        errors, np.zeros(len(names)), bounds=(-np.inf, top), loss="soft_l1", max_nfev=25, diff_step=1e-2
    )
    return moved(found.x)


def ratios(rows: Sequence[Measured], constants: Constants) -> Array:
    """Return predicted over measured throughput of each row."""
    return np.array([row.seconds for row in rows]) / Joint(rows).seconds(constants)


def held_out(rows: Sequence[Measured], by: str) -> Array:
    """Return predicted over measured throughput, each row by constants fitted without its ``family`` or ``kind``."""
    found = np.empty(len(rows))
    for value in sorted({getattr(row, by) for row in rows}):
        outside = [row for row in rows if getattr(row, by) != value]
        inside = [place for place, row in enumerate(rows) if getattr(row, by) == value]
        found[inside] = ratios([rows[place] for place in inside], fit(outside))
    return found
