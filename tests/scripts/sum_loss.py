"""A loss summed over everything, far outside 16 bits."""

import torch
from common import batches, mlp, report

model = mlp(6, 16, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
inputs, targets = batches(1, size=64)[0]
losses = []
for _ in range(40):
    optimizer.zero_grad()
    loss = ((model(inputs) - targets) ** 2).sum() * 1e6
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses=losses)
