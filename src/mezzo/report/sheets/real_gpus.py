"""Predictions for other GPUs, next to measurements on this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.console import Console
from rich.text import Text

from mezzo.records import Prediction, RealGpus
from mezzo.report import bodies, terminal
from mezzo.report import formatting as fmt
from mezzo.report.sheets import shared
from mezzo.report.sheets.compare import CompareSheet
from mezzo.report.sheets.predict import band_text, verdict_text
from mezzo.report.sheets.shared import Fact, Grid

TITLE = "On a real GPU: predicted, not measured"


@dataclass(frozen=True, kw_only=True)
class RealGpusSheet:
    """The table of the predictions, or the reason why there is none."""

    title: str
    caption: str
    table: Grid
    verdicts: list[Fact]
    assumptions: list[Fact]


def real_gpus_sheet(predicted: RealGpus | None) -> RealGpusSheet | None:
    """Return the sheet of ``predicted``; None if no prediction was requested."""
    if predicted is None:
        return None
    unit = fmt.clean(predicted.unit)
    heads = ("GPU", "policy", f"{unit}/s", "10% to 90%", "step", "over FP32", "over TF32", "memory", "largest batch")
    left_out = shared.facts(predicted.not_predicted)
    if predicted.reason:
        caption = f"Not predicted: {fmt.clean(predicted.reason)}."
        return RealGpusSheet(
            title=TITLE, caption=caption, table=Grid(heads=heads, rows=[]), verdicts=left_out, assumptions=[]
        )
    of_batch = f"Batch {predicted.batch} of this script. " if unit != "steps" else ""
    possible = [prediction for prediction in predicted.predictions if prediction.possible]
    verdicts = [
        Fact(what=f"{fmt.clean(prediction.gpu)}, {fmt.clean(prediction.policy)}", value=verdict_text(prediction))
        for prediction in predicted.predictions
    ]
    fits = "" if all(prediction.fits for prediction in possible) else " A batch that does not fit is marked."
    return RealGpusSheet(
        title=TITLE,
        caption=f"{of_batch}A step was traced on this machine without computing its numbers, and timed by formulas that are calibrated on "
        f"public measurements (docs/predict.md); the band contains 8 of 10 measured trainings. Memory is what nvidia-smi would show.{fits}",
        table=Grid(
            heads=heads,
            rows=[_row(prediction) for prediction in predicted.predictions],
            numbers=tuple(range(2, len(heads))),
        ),
        verdicts=[*verdicts, *left_out],
        assumptions=shared.facts(predicted.assumptions),
    )


def _row(prediction: Prediction) -> tuple[str, ...]:
    head = fmt.clean(prediction.gpu), fmt.clean(prediction.policy)
    if not prediction.possible:
        return (*head, *[fmt.MISSING] * 7)
    memory = fmt.bytes_text(prediction.device_bytes) + ("" if prediction.fits else " (does not fit)")
    return (
        *head,
        fmt.rate_text(prediction.throughput),
        band_text(prediction),
        fmt.ms_text(prediction.step_ms),
        fmt.ratio_text(prediction.over_fp32),
        fmt.ratio_text(prediction.over_tf32),
        memory,
        fmt.MISSING if prediction.largest_batch is None else fmt.count_text(prediction.largest_batch),
    )


def compare_details(sheet: CompareSheet, console: Console) -> None:
    """Print the details of a comparison; the predictions for real GPUs are last."""
    bodies.compare_details(sheet, console)
    predicted = real_gpus_sheet(sheet.real_gpus)
    if predicted is None:
        return
    if not predicted.table.rows:
        console.print(Text(f"\n{predicted.title}", style="bold"))
        console.print(Text(f"  {predicted.caption}"))
        return
    gpus = ["", *(gpu for gpu, *_ in predicted.table.rows)]
    rows = [
        ("" if gpu == last else gpu, *cells) for last, (gpu, *cells) in zip(gpus, predicted.table.rows, strict=False)
    ]
    terminal.section(console, predicted.title, terminal.grid_table(replace(predicted.table, rows=rows)))
    console.print(Text(predicted.caption, style="dim"))
