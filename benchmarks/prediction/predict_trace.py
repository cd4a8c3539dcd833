"""How much time and memory does it take to trace a training step for a prediction?

Each model is traced in a separate process: the clock runs from building the model to the finished tape, and the largest resident
memory is that of the whole process, including libraries. timm and transformers are needed.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time

import torch

from benchmarks.shared.harness import report
from mezzo.measure.predict.named import import_library, named_model, tape_of

MODELS = {"timm:resnet50": 256, "transformers:bert-base-uncased": 32}
POLICY = "fp16"
THREADS = 2
RUNS = 3


def main() -> None:
    """Trace each model several times, the models alternating."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in MODELS}
    for _ in range(RUNS):
        for name in MODELS:
            command = [sys.executable, "-m", "benchmarks.prediction.predict_trace", name]
            printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[name].append(json.loads(printed.splitlines()[-1]))
    rows = []
    for name, runs in found.items():
        for what, unit, aim in (("wall_s", "s", "under 10 s"), ("cpu_s", "s", ""), ("peak_gb", "GB", "under 2 GB")):
            values = [run[what] for run in runs]
            text = f"{statistics.median(values):.2f} {unit} ({min(values):.2f} to {max(values):.2f})"
            rows.append((f"{name}, {POLICY}, {what}", text, aim))
    report("predict_trace", rows, {"runs": found})


def one(name: str) -> dict[str, float]:
    """Trace a model in this process.

    Returns:
        Seconds on the clock, CPU seconds, and the largest resident memory of the process in GB.
    """
    torch.set_num_threads(THREADS)
    import_library(name.split(":")[0])
    model = named_model(name)
    wall, cpu = time.perf_counter(), time.process_time()
    tape_of(model, POLICY, MODELS[name], optimizer="adamw", channels_last=False)
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"wall_s": wall_s, "cpu_s": cpu_s, "peak_gb": peak_bytes / 1e9}


if __name__ == "__main__":
    print(json.dumps(one(sys.argv[1])))
