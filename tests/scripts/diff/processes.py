"""A model whose gradients the script itself averages over its processes; the argument names a fault."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

fault = sys.argv[1] if len(sys.argv) > 1 else ""
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
norm = nn.BatchNorm1d(16) if fault == "local statistics" else nn.LayerNorm(16)
model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16), norm, nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(1)
for step in range(2):
    x, y = torch.randint(0, 50, (16,), generator=generator), torch.randint(0, 5, (16,), generator=generator)
    part = slice(rank * 16 // size, (rank + 1) * 16 // size)
    optimizer.zero_grad()
    F.cross_entropy(model(x[part]), y[part]).backward()
    for name, parameter in model.named_parameters():
        if fault == "missing" and name == "4.weight":
            continue
        sent = parameter.grad.bfloat16() if fault == "bf16" and size > 1 and name == "4.weight" else parameter.grad
        dist.all_reduce(sent)
        parameter.grad = sent.float() / (1 if fault == "sum" and name == "4.weight" else size)
    optimizer.step()
dist.destroy_process_group()
