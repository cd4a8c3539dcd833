"""torch.compile of a module, in place, of a function, of a module with a graph break, of the update and of a whole step.

The second argument names the backend.
"""

import sys

import torch
from common import batches, mlp, norm, report
from torch import nn
from torch.nn import functional as F


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = mlp(6, 16), mlp(16, 2, seed=1)

    def forward(self, x):
        x = self.first(x)
        if x.sum().item() > 1e6:  # the graph breaks here
            x = x * 2
        return self.second(torch.tanh(x))


what, backend = sys.argv[1], sys.argv[2]
model = Breaks() if what == "breaks" else mlp(6, 16, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
called = model
if what in ("module", "breaks"):
    called = torch.compile(model, backend=backend, fullgraph=what == "module")
elif what == "in-place":
    model.compile(backend=backend)


@torch.compile(backend=backend, fullgraph=True)
def compiled_loss(x, y):
    return F.mse_loss(model(x), y)


def criterion(x, y):
    return compiled_loss(x, y) if what == "function" else F.mse_loss(called(x), y)


update = torch.compile(lambda: optimizer.step(), backend=backend) if what == "update" else optimizer.step


def step(x, y):
    optimizer.zero_grad()
    loss = criterion(x, y)
    loss.backward()
    norms.append(norm(model.parameters()))
    update()
    losses.append(loss.item())


if what == "step":
    step = torch.compile(step, backend=backend)
inputs, targets = batches(1)[0]
losses, norms = [], []
for _ in range(8):
    step(inputs, targets)
report(losses=losses, norms=norms)
