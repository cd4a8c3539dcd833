"""Activation checkpointing inside a module, or around modules from the script's own loop; reentrant or not."""

import sys

import torch
from common import batches, mlp, norm, report
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

where, reentrant = sys.argv[1], sys.argv[2] == "reentrant"


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 16), nn.LayerNorm(16)
        self.blocks = nn.ModuleList([nn.Sequential(mlp(16, 32, 16, seed=k), nn.Softmax(-1)) for k in range(3)])
        self.last = nn.Linear(16, 2)

    def forward(self, x):
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=reentrant) if where == "module" else block(x))
        return self.last(x)


torch.manual_seed(0)
model = Blocks()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, targets = batches(1)[0]
if where == "script":
    inputs.requires_grad_()  # a reentrant checkpoint needs an input that does
losses, norms, every = [], [], []
for _ in range(8):
    optimizer.zero_grad()
    predicted = checkpoint(model, inputs, use_reentrant=reentrant) if where == "script" else model(inputs)
    loss = F.mse_loss(predicted, targets)
    loss.backward()
    norms.append(norm(model.parameters()))
    every.append([p.grad.norm().item() for p in model.parameters()])
    optimizer.step()
    losses.append(loss.item())
report(losses=losses, norms=norms, every=every, dtype=str(predicted.dtype))
