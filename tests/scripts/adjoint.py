"""Gradients that are computed inside a backward pass: ``adjoint.py function|equilibrium``.

``function``: an autograd function that keeps no activations, as the adjoint of an ordinary differential equation does.
``equilibrium``: a hook that solves for the gradient of a fixed point, as deep equilibrium models do.
"""

import sys

import torch
from common import batches, mlp, norm, report
from torch import nn


class Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layers, x, *parameters):
        ctx.layers = layers
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return layers(x)

    @staticmethod
    def backward(ctx, gradient):
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            out = ctx.layers(x.detach())
        return None, None, *torch.autograd.grad(out, parameters, gradient)


class Function(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = mlp(6, 16, 2)

    def forward(self, x):
        return Adjoint.apply(self.layers, x, *self.layers.parameters())


class Equilibrium(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.inner, self.out = mlp(6, 16), nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x):
        read = self.read(x)
        with torch.no_grad():
            z = torch.zeros_like(read)
            for _ in range(4):
                z = torch.tanh(self.inner(z) + read)
        z = torch.tanh(self.inner(z) + read)
        begin = z.detach().requires_grad_()
        again = torch.tanh(self.inner(begin) + read.detach())

        def solve(gradient):
            found = gradient
            for _ in range(4):
                found = torch.autograd.grad(again, begin, found, retain_graph=True)[0] + gradient
            return found

        z.register_hook(solve)
        return self.out(z)


torch.manual_seed(0)
model = {"function": Function, "equilibrium": Equilibrium}[sys.argv[1]]()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
((x, y),) = batches(1)
losses, norms = [], []
for _ in range(8):
    loss = nn.functional.mse_loss(model(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    norms.append(norm(model.parameters()))
    optimizer.step()
    losses.append(loss.item())
report(losses=losses, norms=norms)
