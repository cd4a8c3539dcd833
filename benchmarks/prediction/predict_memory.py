"""How far is predicted memory from the measured one, row by row of public tables?

The files have the columns of one of the gpu_memory_*.csv files. Each row is traced with its own model, batch and optimizer, and replayed
through the simulated allocator within the memory of its card. Nothing is fitted. ``wrongly fits`` is the share of broken promises: jobs
that were predicted to fit under a cap with ``mezzo predict``'s headroom, but did not. Only tables that record caps have it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.prediction.plot import plot
from benchmarks.prediction.zoo.memory_rows import Found, row
from benchmarks.prediction.zoo.trainings import NotBuilt
from benchmarks.shared import csv_rows, options
from benchmarks.shared.harness import Row, store


def main(argv: Sequence[str] = ()) -> None:
    parser = options(__name__)
    parser.add_argument("--rows", type=Path, nargs="+", required=True)
    parser.add_argument("--plot", type=Path, help="write predicted against measured as a picture")
    chosen = parser.parse_args(argv)
    found, reasons = [], Counter[str]()
    for cells in (cells for path in chosen.rows for cells in csv_rows.read(path)):
        try:
            one = row(cells)
        except NotBuilt as error:
            reasons[str(error)] += 1
            continue
        found.append(one)
        if not one.measured_bytes:
            print(f"{one.name:48} ran out of memory, predicted {'to' if one.right[0] else 'not to'}", flush=True)
            continue
        sizes = f"measured {one.measured_bytes / 2**20:.0f} MiB predicted {one.predicted_bytes / 2**20:.0f} MiB"
        print(
            f"{one.name:48} {sizes} {_percent(one.predicted_bytes, one.measured_bytes):+.1f}%{_device(one)}", flush=True
        )
    summary: list[Row] = []

    def say(what: str, text: str) -> None:
        print(f"{what}: {text}")
        summary.append((what, text, ""))

    for reason, count in reasons.most_common():
        say(f"not predicted ({count})", reason)
    if right := [answer for one in found for answer in one.right]:
        say("would it fit on the card, and under a cap", f"right {sum(right)} of {len(right)}")
    if ratios := _ratio_errors(found):
        text = f"median error {np.median(ratios):.1f}% of {len(ratios)} pairs"
        say("memory of mixed precision over FP32", text)
    devices = [abs(_percent(one.device_bytes, one.measured_device_bytes)) for one in found if one.device_bytes]
    if devices:
        say("nvidia-smi", f"{_said(devices)} of {len(devices)} rows")
    peaks = [one for one in found if one.measured_bytes]
    errors = [abs(_percent(one.predicted_bytes, one.measured_bytes)) for one in peaks]
    if chosen.plot is not None and peaks:
        names = ("measured_bytes", "predicted_bytes")
        gib = [np.array([getattr(one, name) / 2**30 for one in peaks]) for name in names]
        title = f"{len(peaks)} trainings, nothing fitted: median error {np.median(errors):.1f}%"
        plot(chosen.plot, [one.name.split()[0] for one in peaks], *gib, unit="GiB at the peak", title=title)
    promises, broken = sum(one.promises for one in found), sum(one.broken for one in found)
    fits = f"{100 * broken / promises:.1f}%" if promises else "-"
    total = f"{_said(errors)} wrongly fits {fits} of {len(found)} rows ({reasons.total()} not predicted)"
    print(total)
    name = f"predict_{chosen.rows[0].stem.removeprefix('gpu_')}"
    store(name, ["predict_memory", *argv], [*summary, ("all", total, "")], "timm", "torchvision", "transformers")


def _percent(predicted: float, measured: float) -> float:
    return 100 * (predicted / measured - 1)


def _said(errors: list[float]) -> str:
    return f"median {np.median(errors):.1f}% p90 {np.quantile(errors, 0.9):.1f}%" if errors else "median - p90 -"


def _ratio_errors(found: list[Found]) -> list[float]:
    pairs: dict[str, dict[str, Found]] = defaultdict(dict)
    for one in found:
        if one.pair:
            pairs[one.pair][one.precision] = one
    errors = []
    for name, both in pairs.items():
        if set(both) == {"fp32", "fp16"}:
            half, full = both["fp16"], both["fp32"]
            measured, predicted = half.measured_bytes / full.measured_bytes, half.predicted_bytes / full.predicted_bytes
            change = _percent(predicted, measured)
            print(
                f"{name:28} mixed precision over FP32 measured {measured:.3f} predicted {predicted:.3f} {change:+.1f}%"
            )
            errors.append(abs(change))
    return errors


def _device(one: Found) -> str:
    if not one.device_bytes:
        return ""
    sizes = f"nvidia-smi {one.measured_device_bytes >> 20} MiB predicted {one.device_bytes >> 20} MiB"
    return f", {sizes} {_percent(one.device_bytes, one.measured_device_bytes):+.1f}%"
