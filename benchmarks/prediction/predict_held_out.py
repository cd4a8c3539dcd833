"""How far off are predictions for whole public sources that no constant, formula or choice was made with?

``held_out.csv`` has their rows, with the columns of gpu_training_throughput.csv; ``--rows`` takes any other file with these columns. The
shipped constants predict each row. Each row that cannot be predicted is printed with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.prediction.rows import Measured, bound_by_host, measured, ratios
from benchmarks.prediction.zoo.trainings import NotBuilt
from benchmarks.shared import csv_rows, options
from benchmarks.shared.harness import Row, store
from mezzo.measure.predict.plan import LEAST_OF_IMAGES
from mezzo.measure.predict.time import fitted

HELD_OUT = Path(__file__).with_name("held_out.csv")


def main(argv: Sequence[str] = ()) -> None:
    parser = options(__name__)
    parser.add_argument("--rows", type=Path, default=HELD_OUT)
    chosen = parser.parse_args(argv)
    rows, unanswered = [], 0
    for cells in csv_rows.read(chosen.rows):
        try:
            rows.append(measured(cells))
        except NotBuilt as error:
            unanswered += 1
            print(f"not predicted: {_name(cells)}: {error}", flush=True)
    found = ratios(rows, fitted().constants)
    trust = trusted(rows)
    for row, ratio, kind in zip(rows, found, trust, strict=True):
        rates = f"measured {row.throughput:8.1f} predicted {row.throughput * ratio:8.1f} {100 * (ratio - 1):+6.1f}%"
        print(f"{_name(row.cells)}: {rates}, {kind}")
    summary: list[Row] = []
    groups: dict[str, Callable[[int], str]] = {
        "source": lambda at: rows[at].cells["source"],
        "GPU": lambda at: rows[at].gpu.label,
        "source and GPU": lambda at: f"{rows[at].cells['source']}, {rows[at].gpu.label}",
        "precision": lambda at: rows[at].row.precision,
        "trust": lambda at: trust[at],
    }
    for what, value in groups.items():
        for name in sorted({value(at) for at in range(len(rows))}):
            own = [at for at in range(len(rows)) if value(at) == name]
            summary.append((f"{what}: {name}", said(found[own]), ""))
    summary.append(("all", f"{said(found)}, {unanswered} not predicted", ""))
    for what, text, _ in summary:
        print(f"{what}: {text}")
    if chosen.rows == HELD_OUT:
        store("predict_held_out", ["predict_held_out", *argv], summary, "timm", "torchvision")


def trusted(rows: Sequence[Measured]) -> list[str]:
    """Return for each row whether ``mezzo predict`` calls it validated, or why it does not."""
    by_host = bound_by_host(rows, fitted().constants)
    found = []
    for row, host in zip(rows, by_host, strict=True):
        if not fitted().covers(row.gpu.architecture, row.row.precision):
            found.append("not validated, not measured")
        elif host:
            found.append("not validated, bound by the host")
        elif row.kind == "convolutional" and int(row.cells["batch_per_gpu"]) < LEAST_OF_IMAGES:
            found.append("not validated, small batch")
        else:
            found.append("validated")
    return found


def said(found: np.ndarray) -> str:
    """Return the errors of predicted over measured rates."""
    errors = 100 * (found - 1)
    size = np.abs(errors)
    spread = f"mean {size.mean():.1f}% median {np.median(size):.1f}% p90 {np.quantile(size, 0.9):.1f}%"
    return f"{spread} bias {errors.mean():+.1f}% of {len(found)} rows"


def _name(cells: csv_rows.Cells) -> str:
    return " ".join(
        (
            cells["id"],
            cells["gpu"],
            cells["model"],
            cells["precision_label"],
            cells["layout"],
            f"b{cells['batch_per_gpu']}",
        )
    )
