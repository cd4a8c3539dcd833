"""Which constants of the time formulas fit the public kernels and steps best, and with which errors?

Writes ``constants.json`` of ``mezzo.measure.predict``.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import mezzo.measure.predict
from benchmarks.prediction.kernel_tables import kernels
from benchmarks.prediction.rows import Measured, fit, held_out, read
from benchmarks.shared import options
from mezzo.measure.predict.tiles import Array

FILE = Path(mezzo.measure.predict.__file__).with_name("constants.json")
ENOUGH = 25
"""Rows of an architecture that have a band of their own."""


def main(argv: Sequence[str] = ()) -> None:
    parser = options(__name__)
    parser.add_argument("rows", type=Path, help="a file with the columns of gpu_training_throughput.csv")
    parser.add_argument("--kernels", type=Path, required=True, help="the folder of kernel_tables")
    chosen = parser.parse_args(argv)
    rows, reasons = read(chosen.rows)
    tables = kernels(chosen.kernels)
    measured = 1 / held_out(rows, tables, "family")
    low, high = band(measured)
    validated: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        validated[row.family].add({"fp16-half": "fp16"}.get(row.row.precision, row.row.precision))
    data = {
        "constants": {k: float(f"{v:.4g}") for k, v in dataclasses.asdict(fit(rows, tables)).items()},
        "num_rows": len(rows),
        "low": low,
        "high": high,
        "bands": bands(rows, measured),
        "validated": {name: sorted(found) for name, found in sorted(validated.items())},
    }
    FILE.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(FILE.read_text(encoding="utf-8"))
    print(f"{len(rows)} rows; not used: {dict(reasons)}")


def band(measured: Array) -> tuple[float, float]:
    """Return the 10th and 90th percentile of measured over predicted throughput."""
    low, high = np.quantile(measured, [0.1, 0.9])
    return round(float(low), 3), round(float(high), 3)


def bands(rows: Sequence[Measured], measured: Array) -> dict[str, tuple[float, float]]:
    """Return the band of each architecture that has enough rows."""
    counts = Counter(row.family for row in rows)
    names = sorted(name for name, count in counts.items() if count >= ENOUGH)
    return {name: band(measured[[row.family == name for row in rows]]) for name in names}
