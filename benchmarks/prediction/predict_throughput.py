"""How far is predicted throughput from the measured one, row by row of a public table?

The file has the columns of gpu_training_throughput.csv. With ``--hold-out none`` the shipped constants predict every row. With another
choice the constants are fitted again on the rows and on ``--kernels``, without the predicted row's GPU family or class of models.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.prediction.kernel_tables import kernels
from benchmarks.prediction.plot import plot
from benchmarks.prediction.rows import Measured, held_out, ratios, read
from benchmarks.shared import options
from benchmarks.shared.harness import Row, store
from mezzo.measure.predict.time import fitted

BY = {"gpu-family": "family", "model-class": "kind"}


def main(argv: Sequence[str] = ()) -> None:
    parser = options(__name__)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--hold-out", choices=[*BY, "none"], default="none")
    parser.add_argument("--kernels", type=Path, help="the folder of kernel_tables, to fit the constants again")
    parser.add_argument("--plot", type=Path, help="write predicted against measured as a picture")
    chosen = parser.parse_args(argv)
    rows, reasons = read(chosen.rows)
    if chosen.hold_out == "none":
        found = ratios(rows, fitted().constants)
    elif chosen.kernels is None:
        parser.error("--hold-out fits the constants again, and needs --kernels")
    else:
        found = held_out(rows, kernels(chosen.kernels), BY[chosen.hold_out])
    measured, errors = np.array([row.throughput for row in rows]), 100 * (found - 1)
    for row, ratio, error in zip(rows, found, errors, strict=True):
        cells, kind = row.cells, row.row
        print(
            f"{cells['id']:>4} {row.gpu.label:20} {kind.model[:28]:28} {kind.precision:9} {kind.layout} b{cells['batch_per_gpu']:5} "
            f"measured {row.throughput:8.1f} predicted {row.throughput * ratio:8.1f} {error:+6.1f}%"
        )
    summary: list[Row] = []
    for name in BY.values():
        for group in sorted({getattr(row, name) for row in rows}):
            own = errors[[getattr(row, name) == group for row in rows]]
            inside = f", {_share_inside(rows, found, name, group):.0%} in the band" if name == "family" else ""
            summary.append((group, f"{_said(own)} bias {np.mean(own):+.1f}%{inside}", ""))
    pairs = _speed_up_errors(rows, errors)
    summary.append(
        ("AMP over FP32 or TF32 of one GPU, model and framework", f"{_said(pairs)} of {len(pairs)} pairs", "")
    )
    summary += [(f"not predicted ({count})", reason, "") for reason, count in reasons.most_common()]
    for what, text, _ in summary:
        print(f"{what}: {text}")
    if chosen.plot is not None:
        how = "constants of all rows" if chosen.hold_out == "none" else f"{chosen.hold_out} left out of the fit"
        title = f"{len(rows)} public measurements, {how}: {_said(errors)}"
        plot(chosen.plot, [row.family for row in rows], measured, measured * found, unit="samples/s", title=title)
    total = f"{_said(errors)} of {len(rows)} rows ({reasons.total()} not predicted)"
    print(total)
    name = "predict_throughput" + ("" if chosen.hold_out == "none" else f"_without_{chosen.hold_out}")
    store(name, ["predict_throughput", *argv], [*summary, ("all", total, "")], "timm", "torchvision", "transformers")


def _share_inside(rows: list[Measured], found: np.ndarray, name: str, group: str) -> float:
    """Return the share of a group's rows that lie in the band that a prediction shows."""
    inside = []
    for row, ratio in zip(rows, found, strict=True):
        if getattr(row, name) == group:
            low, high = fitted().band(row.gpu.architecture)
            inside.append(low <= 1 / ratio <= high)
    return sum(inside) / len(inside)


def _said(errors: np.ndarray) -> str:
    """Return the mean and the 90th percentile of absolute errors in words."""
    size = np.abs(errors)
    return f"mean {size.mean():.1f}% p90 {np.quantile(size, 0.9):.1f}%" if len(size) else "mean - p90 -"


def _speed_up_errors(rows: list[Measured], errors: np.ndarray) -> np.ndarray:
    """Return the errors in percent of predicted speed-ups of 16 bits."""
    groups: dict[tuple[str, ...], dict[bool, list[float]]] = defaultdict(lambda: {True: [], False: []})
    for row, error in zip(rows, errors, strict=True):
        key = row.cells["model"], row.gpu.name, row.cells["framework"], row.cells["img_or_seq"]
        groups[key][row.row.precision.startswith(("fp16", "bf16"))].append(1 + error / 100)
    both = [group for group in groups.values() if group[True] and group[False]]
    return np.array([100 * (np.mean(g[True]) / np.mean(g[False]) - 1) for g in both])
