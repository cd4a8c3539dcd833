"""TensorBoard's event files: curves as scalars, values by exponent as histograms, settings, verdicts and the report as text.

A comparison is one folder for its table and one for every run in it, so that TensorBoard draws the policies into the same plots.
The files are written by tensorboardX, which needs neither torch nor TensorFlow. TensorBoard stores no other files, so the
page stays where the command wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

from mezzo.records import Histogram
from mezzo.report.tracking.inflight import SUFFIX, Flight
from mezzo.report.tracking.job import TrackedRecord
from mezzo.report.tracking.logged import Cell, Logged

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

PACKAGE = INSTALL = "tensorboardX"
_ON_DISK_WITHIN_S = 1


def check(place: str) -> None:
    """Accept any folder: the command line creates it."""


def send(what: Logged, job: TrackedRecord, place: str) -> str:
    """Write event files to a new folder, ``place/NAME`` or beside the record, and return where they are."""
    folder = Path(place) / job.name if place else job.folder / "tensorboard"
    fresh = _fresh(folder)
    _write(what, fresh)
    for run in what.runs:
        _write(run, fresh / run.name)
    return f"{fresh}; to see it: tensorboard --logdir {place or fresh}"


class InFlight:
    """Events that are written while a run is under way."""

    def __init__(self, flight: Flight, place: str) -> None:
        """Open ``place/NAME-live``, or a folder beside the record."""
        from tensorboardX import SummaryWriter  # an extra

        folder = Path(place) / f"{flight.name}{SUFFIX}" if place else flight.folder / f"tensorboard{SUFFIX}"
        self._writer = SummaryWriter(logdir=str(_fresh(folder)), flush_secs=_ON_DISK_WITHIN_S)
        self.where = self._writer.logdir
        self._writer.add_text("settings", _grid(["", ""], [[*pair] for pair in flight.settings.items()]))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log values of a step; tensorboardX writes them in a thread of its own."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _fresh(folder: Path) -> Path:
    """Return a folder that does not exist yet: the events of two runs in one folder would be drawn as one curve."""
    others = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return next(path for path in chain([folder], others) if not path.exists())


def _write(what: Logged, folder: Path) -> None:
    from tensorboardX import SummaryWriter  # an extra

    writer = SummaryWriter(logdir=str(folder))
    try:
        writer.add_text("report", f"```\n{what.text}\n```")
        writer.add_text("settings", _grid(["", ""], [[*pair] for pair in (what.tags | what.settings).items()]))
        for curve in what.curves:
            for step, value in zip(curve.steps, curve.values, strict=True):
                writer.add_scalar(curve.name, value, step)
        for name, value in what.numbers.items():
            writer.add_scalar(name, value, 0)
        for table in what.tables:
            if table.rows:
                writer.add_text(table.name.replace(" ", "_"), _grid(table.columns, table.rows))
        for name, histogram in what.histograms.items():
            _add_exponents(writer, name, histogram)
    finally:
        writer.close()


def _grid(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return a table in Markdown, which TensorBoard renders."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(cell: Cell) -> str:
    text = "" if cell is None else f"{cell:.6g}" if isinstance(cell, float) else str(cell)
    return " ".join(text.replace("|", "\\|").split())


def _add_exponents(writer: SummaryWriter, name: str, histogram: Histogram) -> None:
    """Add a histogram over the exponent of the magnitude: TensorBoard draws on a linear axis."""
    exponents = range(histogram.first_exponent, histogram.last_exponent + 1)
    writer.add_histogram_raw(
        name,
        min=exponents[0],
        max=exponents[-1] + 1,
        num=histogram.nonzero,
        sum=math.fsum(e * c for e, c in zip(exponents, histogram.counts, strict=True)),
        sum_squares=math.fsum(e * e * c for e, c in zip(exponents, histogram.counts, strict=True)),
        bucket_limits=[e + 1 for e in exponents],
        bucket_counts=histogram.counts,
        global_step=0,
    )
