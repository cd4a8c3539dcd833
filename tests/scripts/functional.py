"""Forward code outside any module: raw tensors for one layer, a module for the other."""

import torch
from common import batches, mlp, report

torch.manual_seed(0)
weight = (torch.randn(6, 16) / 4).requires_grad_()
head = mlp(16, 2)
optimizer = torch.optim.SGD([weight, *head.parameters()], lr=0.1)
inputs, targets = batches(1)[0]
losses = []
for _ in range(8):
    optimizer.zero_grad()
    loss = ((head(torch.tanh(inputs @ weight)) - targets) ** 2).mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses=losses, norm=weight.grad.norm().item())
