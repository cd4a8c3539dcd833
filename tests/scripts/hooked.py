"""Backward hooks of modules, and an optimizer that steps inside the backward pass."""

import sys

import torch
from common import batches, mlp, report
from torch.nn import functional as F

inside = sys.argv[1] == "inside"
model = mlp(6, 16, 2)
seen = []
model[0].register_full_backward_hook(lambda module, gi, go: seen.append(go[0].norm().item()))
model[2].register_full_backward_hook(lambda module, gi, go: (gi[0] * 0.5,))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if inside:
    each = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter):
        each[parameter].step()
        each[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
inputs, targets = batches(1)[0]
inputs.requires_grad_()  # torch warns about a module whose input needs no gradient
losses = []
for _ in range(8):
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    if not inside:
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
report(losses=losses, seen=seen)
