"""One backward pass, two optimizers that step after it."""

import torch
from common import batches, mlp, report
from torch.nn import functional as F

body, head = mlp(6, 16, 8), mlp(8, 2, seed=1)
optimizers = [torch.optim.AdamW(body.parameters(), lr=0.01), torch.optim.SGD(head.parameters(), lr=0.1)]
inputs, targets = batches(1)[0]
losses = []
for _ in range(12):
    loss = F.mse_loss(head(body(inputs)), targets)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
report(losses=losses)
