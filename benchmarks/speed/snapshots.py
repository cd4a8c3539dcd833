"""What does one save a minute cost a session of 110 M parameters?

CPU time is right on a busy machine, too; wall time is not. The training thread is stopped while it copies the
state; checksum and writing run in parallel. The first save also allocates the memory for the copy.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import warnings
from pathlib import Path

import torch
from torch import nn

import mezzo
from benchmarks.shared.harness import report
from mezzo.engine.snapshots import container

CASES = ("fp32", "fp16-master", "bf16-master")
WIDTH, LAYERS = 2048, 26
"""109 M parameters."""
SAVES, EVERY_S = 4, 60.0
TARGET = "1% or less"


def main() -> None:
    warnings.simplefilter("ignore", mezzo.PrecisionWarning)
    torch.set_num_threads(1)  # other threads would copy a part of the state, and their CPU time is not measured
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    rows = []
    for policy in CASES:
        folder = Path(tempfile.mkdtemp(prefix="mezzo-snapshots-"))
        try:
            first, training, writing, size = costs(policy, folder)
        finally:
            shutil.rmtree(folder)
        share = f"{training / EVERY_S:.2%} of a minute, {training:.2f} s of CPU"
        beside = f"first save {first:.2f} s; beside it {writing:.2f} s of CPU for {size / 1e9:.2f} GB"
        rows.append((f"{policy}: training thread stopped by one save a minute ({beside})", share, TARGET))
    report("snapshots", rows, {"load": load})


def costs(policy: str, folder: Path) -> tuple[float, float, float, int]:
    """Return CPU seconds of the first and of the cheapest later save in the training thread and of writing, and the bytes."""
    session = trained(policy)
    stopped: list[float] = []
    wrote: list[float] = []
    write, sizes = container.write, []

    def timed(*given: object) -> int:
        began = time.thread_time()
        sizes.append(write(*given))  # type: ignore[arg-type]
        wrote.append(time.thread_time() - began)
        return sizes[-1]

    container.write = timed  # type: ignore[assignment]
    try:
        for _ in range(SAVES):
            began = time.thread_time()
            saving = session.save(folder, keep=1)
            stopped.append(time.thread_time() - began)
            assert saving is not None
            saving.wait()
    finally:
        container.write = write
    return stopped[0], min(stopped[1:]), min(wrote), sizes[-1]


def trained(policy: str) -> mezzo.Session:
    """Return a session after one update, so that the optimizer has its state."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    session = mezzo.Session(model, mezzo.AdamW(model.parameters()), policy=policy)
    with session.autocast():
        loss = model(torch.randn(2, WIDTH)).float().square().mean()
    session.step(loss)
    return session
