"""A model of four parts, one of which computes something else once it is compiled."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, factor=1.0):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.factor = factor

    def forward(self, x):
        y = self.linear(x).tanh()
        return y * self.factor if torch.compiler.is_compiling() else y


torch.manual_seed(0)
model = nn.Sequential(Block(), Block(), Block(factor=1.01), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(3):
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
