"""Records as TensorBoard event files: numbers by step as scalars, values by exponent as histograms, the report as text.

A run is one folder. A comparison is one folder for the table and one for every run in it, so that TensorBoard draws the
policies into the same plots. The files are written by tensorboardX, which needs neither torch nor TensorFlow.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from mezzo.records import AnyRecord, CompareRecord, DiagnoseRecord, Histogram, RangesRecord, RunRecord
from mezzo.report.text import render

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

_STEP_COLUMNS = ("loss", "loss_scale", "skipped", "grad_norm", "time_ms", "cpu_ms")
_TEXT_WIDTH = 110


def write_events(record: AnyRecord, folder: Path) -> None:
    """Write ``record`` to ``folder``, next to other records' events."""
    with _writer(folder) as writer:
        writer.add_text("report", f"```\n{_text(record)}\n```")
        if isinstance(record, RunRecord):
            _add_run(writer, record)
        elif isinstance(record, DiagnoseRecord):
            _add_trend(writer, record)
        elif isinstance(record, RangesRecord):
            _add_ranges(writer, record)
    if isinstance(record, CompareRecord):
        for run in record.runs:
            name = run.policy_shown.replace(":", "_").replace("*", "_")
            write_events(run, folder / (name if run.seed is None else f"{name}-seed{run.seed}"))


@contextmanager
def _writer(folder: Path) -> Iterator[SummaryWriter]:
    from tensorboardX import SummaryWriter  # an extra

    writer = SummaryWriter(logdir=str(folder))
    try:
        yield writer
    finally:
        writer.close()


def _text(record: AnyRecord) -> str:
    printed = io.StringIO()
    render(record, Console(file=printed, width=_TEXT_WIDTH, highlight=False))
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


def _add_run(writer: SummaryWriter, record: RunRecord) -> None:
    """Add a run's steps, numbered from 1, and what was counted once at step 0."""
    for column in _STEP_COLUMNS:
        for number, value in enumerate(getattr(record.steps, column), start=1):
            if column == "grad_norm" and math.isnan(value) and not record.steps.skipped[number - 1]:
                continue  # not measured
            writer.add_scalar(f"step/{column}", float(value), number)
    if record.metric is not None:
        for number, value in zip(record.metric.steps, record.metric.values, strict=True):
            writer.add_scalar(f"metric/{record.metric.name}", value, number)
    for loss in record.steps.losses:
        for number, value in zip(loss.steps, loss.values, strict=True):
            writer.add_scalar(f"loss/{loss.name}", value, number)
    for kind in ("parameters", "gradients", "optimizer", "activations"):
        size = getattr(record.memory, f"{kind}_bytes")
        if size is not None:
            writer.add_scalar(f"memory/{kind}_bytes", size, 0)
    for name, share in record.effective.share_by_format.items():
        writer.add_scalar(f"share_of_flops/{name}", share, 0)


def _add_trend(writer: SummaryWriter, record: DiagnoseRecord) -> None:
    for step in record.trend:
        for column in ("loss", "grad_norm", "loss_scale"):
            writer.add_scalar(f"step/{column}", getattr(step, column), step.step)
        writer.add_scalar("step/skipped", float(step.skipped), step.step)


def _add_ranges(writer: SummaryWriter, record: RangesRecord) -> None:
    """Add histograms over the exponent of the magnitude: TensorBoard draws on a linear axis."""
    for kind in record.kinds:
        _add_exponents(writer, f"exponents/{kind.kind}", kind.histogram)
    for tensor in record.tensors:
        _add_exponents(writer, f"exponents of {tensor.kind}/{tensor.name}", tensor.histogram)


def _add_exponents(writer: SummaryWriter, tag: str, histogram: Histogram) -> None:
    if not histogram.counts:
        return
    exponents = range(histogram.first_exponent, histogram.last_exponent + 1)
    writer.add_histogram_raw(
        tag,
        min=exponents[0],
        max=exponents[-1] + 1,
        num=histogram.nonzero,
        sum=math.fsum(e * c for e, c in zip(exponents, histogram.counts, strict=True)),
        sum_squares=math.fsum(e * e * c for e, c in zip(exponents, histogram.counts, strict=True)),
        bucket_limits=[e + 1 for e in exponents],
        bucket_counts=histogram.counts,
        global_step=0,
    )
