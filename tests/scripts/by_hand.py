"""Parameters updated by hand: from ``.grad``, or from torch.autograd.grad; or an optimizer fed by torch.autograd.grad."""

import sys

import torch
from common import batches, mlp, report
from torch.nn import functional as F

how = sys.argv[1]
model = mlp(6, 16, 2)
parameters = list(model.parameters())
optimizer = torch.optim.SGD(parameters, lr=0.1) if how == "optimizer" else None
inputs, targets = batches(1)[0]
losses, norms = [], []
for _ in range(12):
    loss = F.mse_loss(model(inputs), targets)
    if how == "backward":
        loss.backward()
        gradients = [p.grad for p in parameters]
    else:
        gradients = torch.autograd.grad(loss, parameters)
    norms.append(torch.stack([g.norm() for g in gradients]).norm().item())
    if optimizer is not None:
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient
        optimizer.step()
    else:
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients):
                parameter -= 0.1 * gradient
                parameter.grad = None
    losses.append(loss.item())
report(losses=losses, norms=norms)
