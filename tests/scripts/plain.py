"""A plain loop over one batch, so that a skipped update shows as the same loss twice."""

import sys

import torch
from common import batches, mlp, norm, report
from torch.nn import functional as F

model = mlp(6, 16, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
inputs, targets = batches(1)[0]
losses, norms = [], []
for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 12):
    optimizer.zero_grad()
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    norms.append(norm(model.parameters()))
    optimizer.step()
    losses.append(loss.item())
report(losses=losses, norms=norms, dtypes=[str(p.dtype) for p in model.parameters()])
