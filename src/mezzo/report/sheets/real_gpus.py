"""Predictions for other GPUs, beside measurements on this machine."""

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


def real_gpus_sheet(found: RealGpus | None) -> RealGpusSheet | None:
    """Return the sheet of ``found``; None if no prediction was asked for."""
    if found is None:
        return None
    unit = fmt.clean(found.unit)
    heads = ("GPU", "policy", f"{unit}/s", "10% to 90%", "step", "over FP32", "over TF32", "memory", "largest batch")
    left_out = shared.facts(found.not_predicted)
    if found.reason:
        caption = f"Not predicted: {fmt.clean(found.reason)}."
        return RealGpusSheet(
            title=TITLE, caption=caption, table=Grid(heads=heads, rows=[]), verdicts=left_out, assumptions=[]
        )
    of_batch = f"Batch {found.batch} of this script. " if unit != "steps" else ""
    possible = [one for one in found.predictions if one.possible]
    verdicts = [
        Fact(what=f"{fmt.clean(one.gpu)}, {fmt.clean(one.policy)}", value=verdict_text(one))
        for one in found.predictions
    ]
    fits = "" if all(one.fits for one in possible) else " A batch that does not fit is marked."
    return RealGpusSheet(
        title=TITLE,
        caption=f"{of_batch}Traced on this machine without numbers and priced by formulas that public measurements calibrate "
        f"(docs/predict.md); the band contains 8 of 10 measured trainings. Memory is what nvidia-smi would show.{fits}",
        table=Grid(heads=heads, rows=[_row(one) for one in found.predictions], numbers=tuple(range(2, len(heads)))),
        verdicts=[*verdicts, *left_out],
        assumptions=shared.facts(found.assumptions),
    )


def _row(one: Prediction) -> tuple[str, ...]:
    head = fmt.clean(one.gpu), fmt.clean(one.policy)
    if not one.possible:
        return (*head, *[fmt.MISSING] * 7)
    memory = fmt.bytes_text(one.device_bytes) + ("" if one.fits else " (too much)")
    return (
        *head,
        fmt.rate_text(one.throughput),
        band_text(one),
        fmt.ms_text(one.step_ms),
        fmt.ratio_text(one.over_fp32),
        fmt.ratio_text(one.over_tf32),
        memory,
        fmt.MISSING if one.largest_batch is None else str(one.largest_batch),
    )


def compare_details(sheet: CompareSheet, console: Console) -> None:
    """Print the details of a comparison, with what is predicted for real GPUs last."""
    bodies.compare_details(sheet, console)
    found = real_gpus_sheet(sheet.real_gpus)
    if found is None:
        return
    if not found.table.rows:
        console.print(Text(f"\n{found.title}", style="bold"))
        console.print(Text(f"  {found.caption}"))
        return
    gpus = ["", *(gpu for gpu, *_ in found.table.rows)]
    rows = [("" if gpu == last else gpu, *cells) for last, (gpu, *cells) in zip(gpus, found.table.rows, strict=False)]
    terminal.section(console, found.title, terminal.grid_table(replace(found.table, rows=rows)))
    console.print(Text(found.caption, style="dim"))
