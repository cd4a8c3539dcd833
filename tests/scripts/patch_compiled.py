"""A compiled model; the loss is computed in the expression of the backward pass."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
compiled = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
criterion = nn.MSELoss()
inputs, targets = torch.randn(8, 6), torch.randn(8, 2)
for _ in range(8):
    criterion(compiled(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
