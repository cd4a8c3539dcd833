"""Gradients of each sample from torch.func, handed to an optimizer; argv[1] is "shared" where functions are given detached weights."""

import sys

import torch
from common import batches, mlp, report
from torch.func import functional_call, grad_and_value, vmap

torch.manual_seed(0)
model = mlp(6, 16, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
parameters = {name: p.detach() if "shared" in sys.argv else p for name, p in model.named_parameters()}


def loss_of(weights, x, y):
    return ((functional_call(model, weights, (x.unsqueeze(0),)) - y) ** 2).mean()


losses = []
for inputs, targets in batches(8):
    gradients, values = vmap(grad_and_value(loss_of), in_dims=(None, 0, 0))(parameters, inputs, targets)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].mean(0).detach()
    optimizer.step()
    losses.append(values.mean().item())
report(losses=losses, norm=model[0].weight.grad.norm().item())
