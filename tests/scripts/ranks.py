"""A training in several processes: ``ranks.py KIND STEPS [WHAT]``.

KIND: ddp or fsdp. WHAT: hang, in rank 1 at the fifth step; or overflow, half of the time in a random rank.
A rank that hangs leaves a file ``hangs-PID`` first, and one that then waits for it a file ``waits-PID``.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

kind, num_steps, what = [*sys.argv[1:], ""][:3]
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
if kind == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
else:
    from torch.distributed.fsdp import fully_shard

    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data, chance = torch.Generator().manual_seed(rank), torch.Generator().manual_seed(99)
injected = 0
for step in range(1, int(num_steps) + 1):
    inputs, targets = torch.randn(8, 16, generator=data), torch.randint(0, 4, (8,), generator=data)
    if what == "hang" and rank == 1 and step == 5:
        Path(f"hangs-{os.getpid()}").touch() or time.sleep(1000)
    loss = F.cross_entropy(model(inputs), targets)
    unlucky = torch.rand((), generator=chance) < 0.5, int(torch.randint(0, size, (), generator=chance))
    if what == "overflow" and unlucky == (True, rank):
        loss = loss * 1e8
        injected += 1
    if what == "hang" and step == 5:
        loss.register_hook(lambda _: Path(f"waits-{os.getpid()}").touch())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
print(
    f"rank {rank} injected {injected} weights {sum(w.detach().double().sum().item() for w in weights)!r}\n",
    end="",
    flush=True,
)
dist.destroy_process_group()
