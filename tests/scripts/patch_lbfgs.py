"""An optimizer that calls a closure."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=4)
inputs, targets = torch.randn(32, 6), torch.randn(32, 2)


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    return loss


for _ in range(4):
    print(optimizer.step(closure).item())
