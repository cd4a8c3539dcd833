"""Clip gradients by their norm, by their value, or in a hook on each parameter."""

import sys

import torch
from common import batches, mlp, norm, report
from torch.nn import functional as F

how = sys.argv[1]
model = mlp(6, 16, 2)
if how == "hook":
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
inputs, targets = batches(1)[0]
losses, before, after = [], [], []
for _ in range(12):
    optimizer.zero_grad()
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    before.append(norm(model.parameters()))
    if how == "norm":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)
    elif how == "value":
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    after.append(norm(model.parameters()))
    optimizer.step()
    losses.append(loss.item())
report(losses=losses, before=before, after=after)
