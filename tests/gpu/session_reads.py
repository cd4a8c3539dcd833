"""Count in which steps a session waits for its GPU: ``python session_reads.py DEVICE``; a line of JSON for each session."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from reads_script import profiled, waits_of
from torch import nn

import mezzo

SESSIONS = [
    # the policy, the optimizer, waits a step
    ("fp16", "mezzo.AdamW", 0),
    ("bf16", "mezzo.AdamW", 0),
    ("bf16", "mezzo.SGD", 0),
    ("fp16-master", "mezzo.AdamW", 0),
    ("bf16-master", "mezzo.AdamW", 0),
    ("bf16-pure", "mezzo.AdamW", 0),
    ("fp32", "mezzo.SGD", 0),
    ("fp16", "torch.optim.AdamW", 1),
    ("fp16", "torch.optim.SGD", 1),
    ("bf16", "torch.optim.AdamW", 0),
]


def step_of(device: str, policy: str, optimizer: str) -> Callable[[], None]:
    """Return a step of a session that clips and has a scheduler."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 8)).to(device)
    library, _, kind = optimizer.rpartition(".")
    made = getattr(mezzo if library == "mezzo" else torch.optim, kind)(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(made, 0.999)
    session = mezzo.Session(model, made, policy=policy, clip_norm=1.0, scheduler=scheduler)
    x, y = torch.randn(16, 64).to(device), torch.randint(8, (16,)).to(device)

    def step() -> None:
        with session.autocast():
            loss = nn.functional.cross_entropy(model(x).float(), y)
        session.step(loss)

    return step


def main(device: str) -> None:
    for policy, optimizer, _ in SESSIONS:
        step = step_of(device, policy, optimizer)
        waits = [waits_of(step, device) for _ in range(110)]
        print(json.dumps({"policy": policy, "optimizer": optimizer, "waits": waits}), flush=True)
        print(json.dumps({"policy": policy, "optimizer": optimizer, "profiled": profiled(step, device)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
