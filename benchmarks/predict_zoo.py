"""Predicted against measured step time and memory of named models: python benchmarks/predict_zoo.py --rows zoo.csv.

FILE is what ``measure_zoo.py`` wrote. Each row is predicted as ``mezzo predict --model`` does, with the constants that ship and no
calibration of the GPU. timm and transformers are needed, best in the versions that the rows name.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter, defaultdict
from functools import cache, partial
from pathlib import Path

import numpy as np

from mezzo.errors import UsageError
from mezzo.gpus import Gpu, find_gpu
from mezzo.measure.predict.named import named_model, tape_of
from mezzo.measure.predict.plan import Tapes, predict, recorded_as
from mezzo.records import Prediction

Cells = dict[str, str]
MEASURES = {
    "throughput": "throughput",
    "allocated": "allocated_bytes",
    "reserved": "reserved_bytes",
    "device": "device_bytes",
}
"""What is compared, with the column that has it; predictions have it under the same name."""
_SETTING = "model", "size", "batch", "gpu"


@cache
def tapes(model: str, size: int, batch: int, policy: str, channels_last: bool) -> Tapes:
    """Return the training of a row under one policy, at its own batch alone."""
    known = named_model(model, **({"sequence": size} if model.startswith("transformers") else {"image": size}))
    return Tapes(tape_of(known, policy, batch, optimizer="adamw", channels_last=channels_last), None)


def predicted(cells: Cells, gpu: Gpu) -> Prediction:
    """Return the prediction of a row."""
    batch, channels_last = int(cells["batch"]), cells["channels_last"] == "True"
    of = partial(tapes, cells["model"], int(cells["size"]), batch, channels_last=channels_last)
    both = {policy: of(policy) for policy in ("fp32", recorded_as(cells["policy"]))}
    return predict(both, gpu, cells["policy"], batch=batch, channels_last=channels_last)


def main() -> None:
    """Print each row, the gains of 16 bits, and the errors."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=Path, required=True)
    options = parser.parse_args()
    rows: list[tuple[Cells, dict[str, float]]] = []
    reasons = Counter[str]()
    with options.rows.open(encoding="utf-8", newline="") as file:
        for cells in csv.DictReader(file):
            gpu = find_gpu(cells["gpu"])
            if gpu is None or cells["status"] != "ok":
                reasons[cells["status"] if gpu is not None else f"no facts about {cells['gpu']}"] += 1
                continue
            try:
                found = predicted(cells, gpu)
            except UsageError as error:
                reasons[str(error)] += 1
                continue
            ratios = {name: getattr(found, field) / float(cells[field]) for name, field in MEASURES.items()}
            rows.append((cells, ratios))
            layout = " channels-last" if cells["channels_last"] == "True" else ""
            errors = "  ".join(f"{name} {100 * (ratio - 1):+6.1f}%" for name, ratio in ratios.items())
            print(
                f"{cells['model']:36} {cells['size']:>4} b{cells['batch']:4} {cells['policy']}{layout}: "
                f"measured {float(cells['step_ms']):7.2f} ms predicted {found.step_ms:7.2f} ms  {errors}",
                flush=True,
            )
    for reason, count in reasons.most_common():
        print(f"not predicted ({count}): {reason}")
    for name, base in (("speed", "fp32"), ("speed", "tf32"), ("memory", "fp32")):
        errors = gains(rows, "throughput" if name == "speed" else "allocated", base)
        print(f"{name} of 16 bits over {base}: {said(errors)} of {len(errors)} pairs")
    for name in MEASURES:
        print(f"{name}: {said([100 * (ratios[name] - 1) for _, ratios in rows])} of {len(rows)} rows")


def gains(rows: list[tuple[Cells, dict[str, float]]], measure: str, base: str) -> list[float]:
    """Return the errors in percent of predicted ratios of 16 bits over ``base``, channels-first both."""
    groups: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    for cells, ratios in rows:
        if cells["channels_last"] == "False":
            groups[tuple(cells[key] for key in _SETTING)][cells["policy"]] = ratios[measure]
    return [
        100 * (group[half] / group[base] - 1)
        for group in groups.values()
        for half in ("bf16", "fp16")
        if half in group and base in group
    ]


def said(errors: list[float]) -> str:
    """Return the mean, the median, the 90th percentile and the bias of errors in words."""
    if not errors:
        return "nothing"
    size = np.abs(errors)
    middle, p90 = np.quantile(size, [0.5, 0.9])
    return f"mean {size.mean():.1f}% median {middle:.1f}% p90 {p90:.1f}% bias {np.mean(errors):+.1f}%"


if __name__ == "__main__":
    main()
