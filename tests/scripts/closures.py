"""Optimizers that call a closure: LBFGS, and SGD for comparison."""

import sys

import torch
from common import batches, mlp, report
from torch.nn import functional as F

model = mlp(6, 8, 2)
if sys.argv[1] == "lbfgs":
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")
elif sys.argv[1] == "lbfgs-fixed":
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=5)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, targets = batches(1, size=32)[0]
evaluations, losses = [], []


def closure():
    evaluations.append(1)
    optimizer.zero_grad()
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    return loss


for _ in range(6):
    losses.append(optimizer.step(closure).item())
report(losses=losses, evaluations=len(evaluations))
