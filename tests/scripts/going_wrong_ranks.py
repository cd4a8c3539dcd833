"""DistributedDataParallel over gloo. From step 120 on, in rank 1 alone:

spike: the loss is far too large, and its gradients are as before; twice: the loss is NaN, and again as soon as the weights are finite.
"""

import sys
import time

import torch
import torch.distributed as dist
from common import labelled, mlp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

fault, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(mlp(6, 16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = labelled()
step = times = 0
while step < steps:
    for samples, labels in loader:
        step += 1
        loss = nn.functional.cross_entropy(model(samples + rank), labels)
        if fault == "spike" and rank == 1 and step >= 120:
            loss = loss + 100.0
        if (
            fault == "twice"
            and rank == 1
            and step >= 120
            and times < 2
            and bool(model.module[0].weight.isfinite().all())
        ):
            loss, times = loss * float("nan"), times + 1
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.02)
        if step >= steps:
            break
print(f"rank {rank} finished {step}\n", end="", flush=True)
dist.destroy_process_group()
