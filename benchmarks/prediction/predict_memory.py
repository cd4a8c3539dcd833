"""How far is predicted memory from the measured one, row by row of public tables?

FILE has the columns of one of the gpu_memory_*.csv files. Each row is traced with its own model, batch and optimizer, and replayed
through the simulated allocator within the memory of its card. Nothing is fitted. ``wrongly fits`` is the share of broken promises: jobs
that were predicted to fit under a cap with ``mezzo predict``'s headroom, but did not. Only tables that record caps have it.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.prediction.plot import plot
from benchmarks.prediction.zoo.memory_rows import Found, row
from benchmarks.prediction.zoo.named import NotBuilt
from benchmarks.shared import options


def main(argv: Sequence[str] = ()) -> None:
    """Print each row, the reasons of the others and the errors."""
    parser = options(__name__)
    parser.add_argument("--rows", type=Path, nargs="+", required=True)
    parser.add_argument("--plot", type=Path, help="write predicted against measured as a picture")
    chosen = parser.parse_args(argv)
    found, reasons = [], Counter[str]()
    for path in chosen.rows:
        for cells in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
            try:
                one = row(cells)
            except NotBuilt as error:
                reasons[str(error)] += 1
                continue
            error = 100 * (one.predicted_bytes / one.measured_bytes - 1)
            found.append(one)
            sizes = f"measured {one.measured_bytes / 2**20:.0f} MiB predicted {one.predicted_bytes / 2**20:.0f} MiB"
            print(f"{one.name:48} {sizes} {error:+.1f}%{_device(one)}", flush=True)
    for reason, count in reasons.most_common():
        print(f"not predicted ({count}): {reason}")
    right = [answer for one in found for answer in one.right]
    if right:
        print(f"would it fit under a cap: right {sum(right)} of {len(right)}")
    ratios = _ratio_errors(found)
    if ratios:
        print(f"memory of mixed precision over FP32: median error {np.median(ratios):.1f}% of {len(ratios)} pairs")
    devices = [100 * abs(one.device_bytes / one.measured_device_bytes - 1) for one in found if one.device_bytes]
    if devices:
        print(
            f"nvidia-smi: median {np.median(devices):.1f}% p90 {np.quantile(devices, 0.9):.1f}% of {len(devices)} rows"
        )
    promises, broken = sum(one.promises for one in found), sum(one.broken for one in found)
    size = np.abs([100 * (one.predicted_bytes / one.measured_bytes - 1) for one in found])
    if chosen.plot is not None and found:
        gib = [
            np.array([getattr(one, name) / 2**30 for one in found]) for name in ("measured_bytes", "predicted_bytes")
        ]
        title = f"{len(found)} trainings, nothing fitted: median error {np.median(size):.1f}%"
        plot(chosen.plot, [one.name.split()[0] for one in found], *gib, unit="GiB at the peak", title=title)
    median, p90 = (f"{np.median(size):.1f}%", f"{np.quantile(size, 0.9):.1f}%") if len(size) else ("-", "-")
    fits = f"{100 * broken / promises:.1f}%" if promises else "-"
    print(f"median {median} p90 {p90} wrongly fits {fits} of {len(found)} rows ({reasons.total()} not predicted)")


def _ratio_errors(found: list[Found]) -> list[float]:
    pairs: dict[str, dict[str, Found]] = {}
    for one in found:
        if one.pair:
            pairs.setdefault(one.pair, {})[one.precision] = one
    errors = []
    for name, both in pairs.items():
        if set(both) == {"fp32", "fp16"}:
            half, full = both["fp16"], both["fp32"]
            measured = half.measured_bytes / full.measured_bytes
            predicted = half.predicted_bytes / full.predicted_bytes
            change = 100 * (predicted / measured - 1)
            print(
                f"{name:28} mixed precision over FP32 measured {measured:.3f} predicted {predicted:.3f} {change:+.1f}%"
            )
            errors.append(abs(change))
    return errors


def _device(one: Found) -> str:
    if not one.device_bytes:
        return ""
    error = 100 * (one.device_bytes / one.measured_device_bytes - 1)
    return f", nvidia-smi {one.measured_device_bytes >> 20} MiB predicted {one.device_bytes >> 20} MiB {error:+.1f}%"
