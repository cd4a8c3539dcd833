"""How much time and memory does it take to trace a training step for a prediction?

Each model is traced in a separate process: the clock runs from building the model to the finished tape, and the largest resident
memory is the whole process's, including libraries. timm and transformers are needed.
"""

from __future__ import annotations

import resource
import sys
import time
from functools import partial

import torch

from benchmarks.shared.harness import report, spread, summary
from benchmarks.shared.processes import answer_of
from mezzo.measure.predict.named import import_library, named_model, tape_of

MODELS = {"timm:resnet50": 256, "transformers:bert-base-uncased": 32, "transformers:gpt2": 8}
POLICY, THREADS, RUNS = "fp16", 2, 3


def main() -> None:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in MODELS}
    for _ in range(RUNS):
        for name in MODELS:
            found[name].append(answer_of(partial(_traced, name), start="spawn"))
    rows = []
    for name, runs in found.items():
        for what, unit, aim in (("wall_s", "s", "under 3 s"), ("cpu_s", "s", ""), ("peak_gb", "GB", "under 2 GB")):
            text = spread(summary([run[what] for run in runs]), f" {unit}")
            rows.append((f"{name}, {POLICY}, {what}", text, aim))
    report("predict_trace", rows, {"runs": found})


def _traced(name: str) -> dict[str, float]:
    """Trace a model in this process; return seconds on the clock, CPU seconds, and the largest resident memory in GB."""
    torch.set_num_threads(THREADS)
    import_library(name.split(":")[0])
    model = named_model(name)
    wall, cpu = time.perf_counter(), time.process_time()
    tape_of(model, POLICY, MODELS[name], optimizer="adamw", channels_last=False)
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"wall_s": wall_s, "cpu_s": cpu_s, "peak_gb": peak_bytes / 1e9}
