"""Two gloo processes with DistributedDataParallel: ``python parallel.py STEP``, rank 1 gets bad data in that step."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, 7):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    if os.environ["RANK"] == "1" and step == int(sys.argv[1]):
        x = torch.frombuffer(bytearray(b"\xff" * 4 * 48), dtype=torch.float32).reshape(8, 6)
    optimizer.zero_grad()
    F.mse_loss(model(x), x[:, :2].nan_to_num()).backward()
    optimizer.step()
dist.destroy_process_group()
