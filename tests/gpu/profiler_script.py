"""A loop that may profile itself: ``python profiler_script.py DEVICE none|whole|schedule|autograd|step``.

``whole`` profiles steps 2 to 5, ``step`` each by itself, ``schedule`` has a warm-up, ``autograd`` is the older interface. Prints how many
operations and kernels the script's own profile has.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn

STEPS = 7
KINDS = ("whole", "step", "schedule", "autograd")
ACTIVITIES = [torch.profiler.ProfilerActivity.CPU]


def main(device: str, kind: str) -> None:
    torch.manual_seed(0)
    if device == "cuda":
        ACTIVITIES.append(torch.profiler.ProfilerActivity.CUDA)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(16, 64).to(device), torch.randint(8, (16,)).to(device)
    profiles: list[Any] = []

    def new(**settings: Any) -> Any:
        profiles.append(torch.profiler.profile(activities=ACTIVITIES, acc_events=True, **settings))
        return profiles[-1]

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    if kind == "schedule":
        with new(schedule=torch.profiler.schedule(wait=0, warmup=2, active=3, repeat=1)) as profile:
            for _ in range(STEPS):
                step()
                profile.step()
    elif kind in ("whole", "autograd"):
        step()
        own = torch.autograd.profiler.profile(use_device="cuda" if device == "cuda" else None)
        profiles += [own] if kind == "autograd" else []
        with own if kind == "autograd" else new():
            for _ in range(STEPS - 3):
                step()
        step()
        step()
    else:
        for _ in range(STEPS):
            if kind == "step":
                with new():
                    step()
            else:
                step()
    found = [p.function_events if kind == "autograd" else p.events() for p in profiles]
    events = [event for one in found for event in one or []]
    kernels = sum(len(event.kernels) for event in events)
    print(
        json.dumps({"products": sum(e.name == "aten::addmm" for e in events) > 0, "kernels": kernels > 0}), flush=True
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
