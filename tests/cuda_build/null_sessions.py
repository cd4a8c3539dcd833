"""Sessions on GPUs that compute nothing, with Mezzo's own kernels; prints what they asked of the GPU, as JSON.

Usage: ``python null_sessions.py DEVICE POLICY OPTIMIZER``, the last as ``mezzo.AdamW`` or ``torch.optim.SGD``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton_driver
from null_model import Loss, Net, calls
from torch import Tensor
from torch.utils._pytree import tree_map_only

import mezzo
from fake_cuda import Operations

STEPS = 8


def main(device: str, policy: str, library: str, kind: str) -> dict[str, Any]:
    """Train, save and load; return waits a step, launches of Mezzo's kernels, bytes that saving and loading allocated."""
    triton_driver.install(90, device_type="cuda")
    model = Net().to(device)
    optimizer = getattr(mezzo if library == "mezzo" else torch.optim, kind)(model.parameters(), lr=1e-3)
    session = mezzo.Session(model, optimizer, policy=policy, clip_norm=1.0)
    asked = session.state.progress.floor.reached
    session.state.progress.floor.reached = lambda: asked() and False  # type: ignore[method-assign]  # no kernel wrote the flag: it is what lay there before
    inputs, losses = torch.randn(32, 8).to(device), torch.linspace(2.0, 1.0, STEPS).to(device)

    def loss_of(number: int) -> Tensor:
        with session.autocast():
            return Loss.apply(model(inputs), losses[number])

    waits, launches, mixed = [], [], []
    for number in range(STEPS):
        before, launched = calls.null_gpu_waits(), len(triton_driver.launched)
        with Operations() as log:
            session.step(loss_of(number))
        mixed += log.mixed
        waits.append(calls.null_gpu_waits() - before)
        launches.append(len(triton_driver.launched) - launched)
    torch.cuda.reset_peak_memory_stats(device)
    kept = torch.cuda.memory_allocated(device)
    state = session.state_dict()
    saved = torch.cuda.max_memory_allocated(device) - kept
    state = tree_map_only(Tensor, lambda t: t.cpu(), state)  # as it comes from a file
    torch.cuda.reset_peak_memory_stats(device)
    session.load_state_dict(state)
    loaded = torch.cuda.max_memory_allocated(device) - kept
    return {
        "waits": waits,
        "launches": launches,
        "mixed": mixed,
        "saved_bytes": saved,
        "loaded_bytes": loaded,
        "after_bytes": torch.cuda.memory_allocated(device) - kept,
        "largest_bytes": max(p.numel() for p in model.parameters()) * 4,
        "update": {choice.what: choice.reason for choice in session.explain()}["update"],
        **captured(session, model, inputs, losses),
    }


def captured(session: mezzo.Session, model: Net, inputs: Tensor, losses: Tensor) -> dict[str, Any]:
    """Capture the step, replay it; return why it could not be, or what replays asked of the GPU."""
    for parameter in model.parameters():
        parameter.grad = None
    try:
        step = session.capture(lambda x, loss: Loss.apply(model(x), loss), inputs, losses[0])
    except mezzo.SessionError as error:
        return {"not_captured": str(error)}
    waits, graphs = calls.null_gpu_waits(), calls.null_gpu_calls(b"cudaGraphLaunch")
    for number in range(1, STEPS):
        step(inputs, losses[number])
    return {
        "replay_waits": calls.null_gpu_waits() - waits,
        "graphs_launched": calls.null_gpu_calls(b"cudaGraphLaunch") - graphs,
    }


if __name__ == "__main__":
    device, policy, optimizer = sys.argv[1:]
    library, _, kind = optimizer.rpartition(".")
    print(json.dumps(main(device, policy, library, kind)))
