"""DistributedDataParallel over gloo; the environment says which process this is, as torchrun does."""

import torch
import torch.distributed as dist
from common import batches, mlp, report
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(mlp(6, 16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, targets = batches(2)[dist.get_rank()]
for _ in range(5):
    optimizer.zero_grad()
    F.mse_loss(model(inputs), targets).backward()
    optimizer.step()
report(norm=sum(p.norm().item() for p in model.parameters()))
dist.destroy_process_group()
