"""Count in which steps the host waits for its GPU: ``python reads_script.py DEVICE plain|own|fused STEPS``.

``own`` and ``fused`` are loops with autocast and a GradScaler of their own; ``fused`` and ``plain`` have a fused optimizer. Torch
warns of each wait ("sync debug mode"); then some steps run under torch's profiler, which sees the calls of CUDA's runtime. Prints
both, as JSON.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WAIT = "called a synchronizing CUDA operation"
PROFILED = 5
EARLY, LATE = slice(10, 20), slice(-10, None)
"""Steps that the tests look at, counted from 0: some of the first hundred, and the last."""
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")


def waits_of(step: Callable[[], object], device: str) -> int:
    """Return how often the host waits in a step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    return sum(WAIT in str(one.message) for one in caught)


def profiled(step: Callable[[], object], device: str) -> dict[str, Any]:
    """Return the waits that the profiler saw in ``PROFILED`` steps, and how many kernels were launched: 0 if it sees nothing."""
    if device != "cuda":
        return {"waits": 0, "launches": 0}
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    try:
        step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            for _ in range(PROFILED):
                with torch.profiler.record_function("a step"):
                    step()
        events = list(profile.events())
        ranges = [e.time_range for e in events if e.name == "a step" and e.device_type is torch.autograd.DeviceType.CPU]
        inside = [e for e in events if any(r.start <= e.time_range.start < r.end for r in ranges)]
        named = [e.name for e in inside if e.name in _WAITS]
        launches = sum(e.name.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for e in inside)
        return {"waits": len(named) / PROFILED, "named": named, "launches": launches}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def step_of(device: str, kind: str) -> Callable[[], None]:
    """Return a step of a script."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=kind in ("fused", "plain"))
    scaler = torch.amp.GradScaler(device, enabled=kind != "plain")
    x, y = torch.randn(16, 64).to(device), torch.randint(8, (16,)).to(device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16, enabled=kind != "plain"):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def main(device: str, kind: str, steps: int) -> None:
    step = step_of(device, kind)
    waits = [waits_of(step, device) for _ in range(steps)]
    print(json.dumps({"kind": kind, "waits": waits}), flush=True)
    print(json.dumps({"kind": kind, "profiled": profiled(step, device)}), flush=True)


if __name__ == "__main__":
    if sys.argv[2] == "each":
        for kind in ("plain", "own", "fused"):
            main(sys.argv[1], kind, int(sys.argv[3]))
    else:
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
