"""Inputs that get gradients: an attack inside training."""

import torch
from common import batches, mlp, report
from torch.nn import functional as F

model = mlp(6, 16, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses, norms, inner = [], [], []
for inputs, targets in batches(8):
    inputs.requires_grad_()
    hidden = model[0](inputs)
    hidden.retain_grad()
    hidden.register_hook(lambda gradient: inner.append(gradient.norm().item()))
    F.mse_loss(model[2](model[1](hidden)), targets).backward()
    norms.append(inputs.grad.norm().item())
    inner.append(hidden.grad.norm().item())
    (slope,) = torch.autograd.grad(F.mse_loss(model(inputs), targets), inputs)
    norms.append(slope.norm().item())
    attacked = (inputs + 0.1 * inputs.grad.sign()).detach()
    optimizer.zero_grad()
    loss = F.mse_loss(model(attacked), targets)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses=losses, norms=norms, inner=inner)
