"""DistributedDataParallel over gloo with 20 batches in rank 0 and 12 in the others: ``uneven.py join|alone|session``."""

import contextlib
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

how = sys.argv[1]
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
torch.manual_seed(0)
samples = 48 if rank else 80
data = TensorDataset(torch.randn(samples, 6), torch.randint(0, 3, (samples,)))
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
session = None
if how == "session":
    import mezzo

    session = mezzo.Session(model, optimizer, policy="fp16")
with contextlib.nullcontext() if how == "alone" else model.join():
    for inputs, targets in DataLoader(data, batch_size=4):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        if session is not None:
            session.step(loss)
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
total = sum(p.detach().double().sum().item() for p in model.parameters())
print(f"RANK {rank} weights {total!r}\n", end="", flush=True)
dist.destroy_process_group()
