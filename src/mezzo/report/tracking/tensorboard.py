"""TensorBoard's event files: curves as scalars, values by exponent as histograms, settings, verdicts and the report as text.

A comparison is one folder for its table and one inside it for every run, so that TensorBoard draws the policies into the same plots.
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
from mezzo.report.log_entries import SUFFIX, LiveRun, LogEntry, TableValue, TrackedRecord
from mezzo.report.terminal import text_of

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

PACKAGE = INSTALL = "tensorboardX"
_ON_DISK_WITHIN_S = 1


def check(place: str) -> None:
    """Accept any folder, since the command line creates it."""


def send(entry: LogEntry, tracked: TrackedRecord, place: str) -> str:
    """Write event files to a new folder, ``place/NAME`` or one next to the record, and return where they are."""
    folder = _new_folder(Path(place) / tracked.name if place else tracked.folder / "tensorboard")
    _write(entry, folder)
    for run in entry.runs:
        _write(run, folder / run.name)
    return f"{folder}; to see it: tensorboard --logdir {place or folder}"


class LiveWriter:
    """Events that are written while a script runs."""

    def __init__(self, run: LiveRun, place: str) -> None:
        """Open ``place/NAME-live``, or a folder next to the record."""
        from tensorboardX import SummaryWriter  # an extra

        folder = Path(place) / f"{run.name}{SUFFIX}" if place else run.folder / f"tensorboard{SUFFIX}"
        self._writer = SummaryWriter(logdir=str(_new_folder(folder)), flush_secs=_ON_DISK_WITHIN_S)
        self.where = self._writer.logdir
        self._writer.add_text("settings", _grid(["", ""], [[*pair] for pair in run.settings.items()]))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log the values of a step; tensorboardX writes them in a thread of its own."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _new_folder(folder: Path) -> Path:
    """Return ``folder``, with a number if it exists: the events of two runs in one folder would be drawn as one curve."""
    others = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return next(path for path in chain([folder], others) if not path.exists())


def _write(entry: LogEntry, folder: Path) -> None:
    from tensorboardX import SummaryWriter  # an extra

    writer = SummaryWriter(logdir=str(folder))
    try:
        writer.add_text("report", f"```\n{text_of(entry.record)}\n```")
        writer.add_text("settings", _grid(["", ""], [[*pair] for pair in (entry.tags | entry.settings).items()]))
        for curve in entry.curves:
            for step, value in zip(curve.steps, curve.values, strict=True):
                writer.add_scalar(curve.name, value, step)
        for name, value in entry.numbers.items():
            writer.add_scalar(name, value, 0)
        for table in entry.tables:
            if table.rows:
                writer.add_text(table.name.replace(" ", "_"), _grid(table.columns, table.rows))
        for name, histogram in entry.histograms.items():
            _add_exponents(writer, name, histogram)
    finally:
        writer.close()


def _grid(columns: Sequence[str], rows: Sequence[Sequence[TableValue]]) -> str:
    """Return a table in Markdown, which TensorBoard renders."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(cell: TableValue) -> str:
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
