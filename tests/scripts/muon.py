"""An optimizer that multiplies in BF16 by itself, as Muon does, in a script without mixed precision.

``wide`` multiplies in FP32, ``compiled`` in a compiled function, as nanochat does.
"""

import sys

import torch
from common import batches, mlp, report
from torch.nn import functional as F


def orthogonal(x):
    x = x / (x.norm() + 1e-7)
    return 1.5 * x - 0.5 * (x @ x.mT @ x)


if "compiled" in sys.argv:
    orthogonal = torch.compile(orthogonal, backend="aot_eager", dynamic=False)


class Orthogonal(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            x = p.grad if "wide" in sys.argv else p.grad.bfloat16()
            p -= 0.02 * orthogonal(x).float()


model = mlp(6, 16, 2)
optimizer = Orthogonal([p for p in model.parameters() if p.ndim == 2])
losses = []
for inputs, targets in batches(4):
    loss = F.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses=losses)
