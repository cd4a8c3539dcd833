"""Accelerate or Fabric in one process on all the data, or in two on a half of it each: ``trainer_ranks.py LIBRARY``.

An overflow comes in one half at the third of six updates.
"""

import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

library = sys.argv[1]
rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if library == "accelerate":
    from mezzo.compat.accelerate import MezzoAccelerator

    room = MezzoAccelerator(cpu=True, policy="fp16:init_scale=1024:fp32=linear", gradient_accumulation_steps=2)
    model, optimizer = room.prepare(model, optimizer)
else:
    from lightning.fabric import Fabric

    from mezzo.compat.lightning import MezzoFabricPrecision

    plugin = MezzoFabricPrecision("fp16:init_scale=1024:fp32=linear")
    room = Fabric(accelerator="cpu", devices=size, strategy="ddp" if size > 1 else "auto", plugins=plugin)
    room.launch()
    model, optimizer = room.setup(model, optimizer)
data = torch.Generator().manual_seed(1)
for micro in range(12):
    inputs, targets = torch.randn(8, 6, generator=data), torch.randint(0, 3, (8,), generator=data)
    half = slice(None) if size == 1 else slice(4 * rank, 4 * rank + 4)
    factors = torch.ones(8)
    if micro == 4:
        factors[6] = float("inf")

    def step():
        loss = (F.cross_entropy(model(inputs[half]), targets[half], reduction="none") * factors[half]).mean()
        room.backward(loss)

    if library == "accelerate":
        with room.accumulate(model):
            step()
            if room.sync_gradients:
                room.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    else:
        step()
        room.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
total = sum(p.detach().double().abs().sum().item() for p in model.parameters())
print(f"RANK {rank} weights {total!r}\n", end="", flush=True)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
