"""How far are step time and memory of named models from what ``measure_zoo`` measured?

Each row of the file is predicted as by ``mezzo predict --model``, with the shipped constants and without a calibration of the GPU. timm and
transformers are needed, best in the versions that the rows name.

``--cases holdout --out holdout_predicted.csv`` predicts a list of ``measure_zoo`` that has not been measured yet, on ``--gpu``, and
stores it with the commit. If there is a ``zoo_predicted.csv`` in the folder of ``zoo.csv``, the stored predictions are compared too: with
the measurements, and with current predictions.
"""

from __future__ import annotations

import math
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from datetime import datetime, timezone
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.measure_zoo import CASES, Case
from benchmarks.shared import ROOT, csv_rows, harness, options
from benchmarks.shared.csv_rows import Cells
from mezzo.errors import UsageError
from mezzo.gpus import Gpu, find_gpu
from mezzo.measure.predict.named import import_library, named_model, tape_of
from mezzo.measure.predict.plan import Tapes, predict, recorded_as
from mezzo.records import Prediction

MEASURES = {"throughput": "throughput"} | {name: f"{name}_bytes" for name in ("allocated", "reserved", "device")}
"""The measures that are compared, with their columns, which are also the fields of predictions."""
STORED = [field.name for field in fields(Case)]
STORED += ["gpu", "step_ms", *MEASURES.values(), "commit", "date", "torch", "library"]
"""Columns of a prediction that is stored until it is measured."""


@cache
def tapes(model: str, size: int, batch: int, policy: str, channels_last: bool) -> Tapes:
    """Return the training of a row under one policy, at its own batch only."""
    known = named_model(model, **({"sequence": size} if model.startswith("transformers") else {"image": size}))
    return Tapes(tape_of(known, policy, batch, optimizer="adamw", channels_last=channels_last), None)


def predicted(cells: Cells, gpu: Gpu) -> Prediction:
    batch, channels_last = int(cells["batch"]), cells["channels_last"] == "True"
    of = partial(tapes, cells["model"], int(cells["size"]), batch, channels_last=channels_last)
    both = {policy: of(policy) for policy in ("fp32", recorded_as(cells["policy"]))}
    return predict(both, gpu, cells["policy"], batch=batch)


def _stored(cases: Sequence[Case], gpu: Gpu) -> Iterator[dict[str, Any]]:
    """Predict ``cases`` on ``gpu``; yield the row of each, and print it."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    for case in cases:
        library = case.model.split(":")[0]
        cells = {key: str(value) for key, value in asdict(case).items()}
        found = predicted(cells, gpu)
        print(f"{label(cells)}: predicted {found.step_ms:7.2f} ms, {found.reserved_bytes >> 20} MiB", flush=True)
        now, version = datetime.now(timezone.utc), import_library(library).__version__
        yield {
            **asdict(case),
            **{name: getattr(found, name) for name in ("step_ms", *MEASURES.values())},
            **{"gpu": gpu.name, "commit": commit, "date": now.isoformat(timespec="seconds")},
            **{"torch": str(torch.__version__), "library": f"{library} {version}"},
        }


def stored_beside(path: Path) -> dict[tuple[str, ...], Cells]:
    """Return the predictions that were stored for the rows of ``path``, by case and GPU; empty if there are none."""
    path = path.with_name(f"{path.stem}_predicted.csv")
    return {key_of(cells): cells for cells in csv_rows.read(path)} if path.exists() else {}


def key_of(cells: Cells) -> tuple[str, ...]:
    gpu = find_gpu(cells["gpu"])
    return (*(cells[field.name] for field in fields(Case)), gpu.name if gpu is not None else cells["gpu"])


def label(cells: Cells) -> str:
    layout = " channels-last" if cells["channels_last"] == "True" else ""
    return f"{cells['model']:36} {cells['size']:>4} b{cells['batch']:4} {cells['policy']}{layout}"


Row = tuple[Cells, dict[str, float]]
"""A row with predicted over measured values."""


def main(argv: Sequence[str] = ()) -> None:
    parser = options(__name__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--rows", type=Path, help="the file that measure_zoo wrote")
    what.add_argument("--cases", choices=CASES, help="predict this list of measure_zoo and store it in --out")
    parser.add_argument("--gpu", default="h100-sxm", help="the GPU of --cases")
    parser.add_argument("--out", type=Path, default=Path("holdout_predicted.csv"), help="the file of --cases")
    chosen = parser.parse_args(argv)
    if chosen.rows is not None:
        rows = compare(chosen.rows)
        harness.store(f"predict_{chosen.rows.stem}", ["predict_zoo", *argv], rows, "timm", "transformers")
        return
    gpu = find_gpu(chosen.gpu)
    if gpu is None:
        parser.error(f"--gpu {chosen.gpu!r} is not a GPU of mezzo/gpus.csv")
    csv_rows.write(chosen.out, _stored(CASES[chosen.cases](), gpu), STORED)


def compare(path: Path) -> list[harness.Row]:
    """Print each row of ``path``; print and return the errors, also of stored predictions if they differ from today's."""
    rows: list[Row] = []
    then: list[Row] = []
    reasons, stored, changed = Counter[str](), stored_beside(path), 0
    for cells in csv_rows.read(path):
        gpu = find_gpu(cells["gpu"])
        if gpu is None or cells["status"] != "ok":
            reasons[cells["status"] if gpu is not None else f"no facts about {cells['gpu']}"] += 1
            continue
        try:
            found = predicted(cells, gpu)
        except UsageError as error:
            reasons[str(error)] += 1
            continue
        today = {name: float(getattr(found, field)) for name, field in MEASURES.items()}
        rows.append((cells, _over_measured(today, cells)))
        before = stored.get(key_of(cells))
        beside = "" if not stored else "  not stored"
        if before is not None:
            kept = {name: float(before[field]) for name, field in MEASURES.items()}
            then.append((cells, _over_measured(kept, cells)))
            differ = [name for name in MEASURES if not math.isclose(kept[name], today[name], rel_tol=1e-6)]
            changed += bool(differ)
            beside = f"  stored {float(before['step_ms']):.2f} ms: {', '.join(differ) or 'nothing'} differs"
        errors = "  ".join(f"{name} {100 * (ratio - 1):+6.1f}%" for name, ratio in rows[-1][1].items())
        times = f"measured {float(cells['step_ms']):7.2f} ms predicted {found.step_ms:7.2f} ms"
        print(f"{label(cells)}: {times}  {errors}{beside}", flush=True)
    for reason, count in reasons.most_common():
        print(f"not predicted ({count}): {reason}")
    summary = _summary(rows)
    if stored:
        commits = ", ".join(sorted({cells["commit"] for cells in stored.values()}))
        text = f"{len(then)} of {len(rows)} rows, {changed} differ from today's"
        summary.append((f"as predicted at {commits}", text, ""))
    if changed:
        summary += _summary(then)
    for what, text, _ in summary:
        print(f"{what}: {text}")
    return summary


def _over_measured(values: dict[str, float], cells: Cells) -> dict[str, float]:
    return {name: value / float(cells[MEASURES[name]]) for name, value in values.items()}


def _summary(rows: list[Row]) -> list[harness.Row]:
    """Return the errors of gains, and of each measure."""
    found = []
    for what, base in (("speed", "fp32"), ("speed", "tf32"), ("memory", "fp32")):
        errors = _gains(rows, "throughput" if what == "speed" else "allocated", base)
        found.append((f"{what} of 16 bits over {base}", f"{said(errors)} of {len(errors)} pairs", ""))
    for name in MEASURES:
        text = said([100 * (ratios[name] - 1) for _, ratios in rows])
        found.append((name, f"{text} of {len(rows)} rows", ""))
    return found


def _gains(rows: list[Row], measure: str, base: str) -> list[float]:
    """Return the errors in percent of predicted ratios of 16 bits over ``base``, both channels-first."""
    groups: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    for cells, ratios in rows:
        if cells["channels_last"] == "False":
            groups[tuple(cells[key] for key in ("model", "size", "batch", "gpu"))][cells["policy"]] = ratios[measure]
    pairs = [(group, half) for group in groups.values() for half in ("bf16", "fp16")]
    return [100 * (group[half] / group[base] - 1) for group, half in pairs if half in group and base in group]


def said(errors: Sequence[float]) -> str:
    """Return the mean, the median, the 90th percentile and the bias of errors in words."""
    if not errors:
        return "nothing"
    size = np.abs(errors)
    middle, p90 = np.quantile(size, [0.5, 0.9])
    return f"mean {size.mean():.1f}% median {middle:.1f}% p90 {p90:.1f}% bias {np.mean(errors):+.1f}%"
