"""Which constants of the time formulas fit the public rows best, and with which errors?

Writes ``constants.json`` of ``mezzo.measure.predict``.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import mezzo.measure.predict
from benchmarks.prediction.rows import fit, held_out, read
from benchmarks.shared import options

FILE = Path(mezzo.measure.predict.__file__).with_name("constants.json")


def main(argv: Sequence[str] = ()) -> None:
    parser = options(__name__)
    parser.add_argument("rows", type=Path, help="a file with the columns of gpu_training_throughput.csv")
    rows, reasons = read(parser.parse_args(argv).rows)
    low, high = np.quantile(1 / held_out(rows, "family"), [0.1, 0.9])
    validated: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        validated[row.family].add({"fp16-half": "fp16"}.get(row.row.precision, row.row.precision))
    data = {
        "constants": {k: float(f"{v:.4g}") for k, v in dataclasses.asdict(fit(rows)).items()},
        "num_rows": len(rows),
        "low": round(float(low), 3),
        "high": round(float(high), 3),
        "validated": {name: sorted(found) for name, found in sorted(validated.items())},
    }
    FILE.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(FILE.read_text(encoding="utf-8"))
    print(f"{len(rows)} rows; not used: {dict(reasons)}")
