"""Sessions on GPUs that compute nothing, with Mezzo's own kernels; prints what they asked of the GPU, as JSON.

Usage: ``python null_sessions.py DEVICE POLICY OPTIMIZER``, the last as ``mezzo.AdamW`` or ``torch.optim.SGD``.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import torch
import triton_driver
from null_model import Loss, Net, calls
from torch import Tensor

import mezzo

STEPS = 8


def operations_across(device: str) -> Any:
    from fake_cuda import Operations

    return Operations()


def main(device: str, policy: str, library: str, kind: str) -> dict[str, Any]:
    """Train, save and load; return waits a step, launches of Mezzo's kernels, bytes that saving and loading allocated."""
    triton_driver.install(90, device_type="cuda")
    model = Net().to(device)
    optimizer = getattr(mezzo if library == "mezzo" else torch.optim, kind)(model.parameters(), lr=1e-3)
    session = mezzo.Session(model, optimizer, policy=policy, clip_norm=1.0)
    inputs, losses = torch.randn(32, 8).to(device), torch.linspace(2.0, 1.0, STEPS).to(device)

    def loss_of(number: int) -> Tensor:
        with session.autocast():
            return Loss.apply(model(inputs), losses[number])

    waits, launches, mixed = [], [], []
    for number in range(STEPS):
        before, launched = calls.null_gpu_waits(), len(triton_driver.launched)
        with operations_across(device) as log:
            session.step(loss_of(number))
        mixed += log.mixed
        waits.append(calls.null_gpu_waits() - before)
        launches.append(len(triton_driver.launched) - launched)
    torch.cuda.reset_peak_memory_stats(device)
    kept = torch.cuda.memory_allocated(device)
    state = session.state_dict()
    saved = torch.cuda.max_memory_allocated(device) - kept
    held = sum(t.untyped_storage().nbytes() for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor))
    torch.cuda.reset_peak_memory_stats(device)
    session.load_state_dict(state)
    loaded = torch.cuda.max_memory_allocated(device) - kept
    gc.collect()
    return {
        "waits": waits,
        "launches": launches,
        "mixed": mixed,
        "saved_bytes": saved,
        "loaded_bytes": loaded,
        "held_bytes": held,
        "after_bytes": torch.cuda.memory_allocated(device) - kept,
        "largest_bytes": max(p.numel() for p in model.parameters()) * 4,
        "explained": [str(reason) for reason in session.explain()],
    }


if __name__ == "__main__":
    device, policy, optimizer = sys.argv[1:]
    library, _, kind = optimizer.rpartition(".")
    print(json.dumps(main(device, policy, library, kind)))
