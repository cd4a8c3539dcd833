"""Long sums of one sign: of the products of a wide layer, and of a large gradient and small ones.

Arguments: the number of small gradients, and the learning rate.
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.out = nn.Linear(4096, 8), nn.Linear(8, 1)
        nn.init.uniform_(self.wide.weight, 0.0, 1e-3)
        nn.init.constant_(self.out.weight, 0.1)

    def forward(self, x):
        return self.out(self.wide(x))


model = Sums()
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[2]))
x, weights = torch.rand(4, 4096), [1.0, *[0.0015] * int(sys.argv[1])]
with torch.no_grad():
    wide = F.linear(x.double(), model.wide.weight.double(), model.wide.bias.double())
    y = F.linear(wide, model.out.weight.double(), model.out.bias.double()).float() + 1
for _ in range(4):
    optimizer.zero_grad()
    for weight in weights:
        loss = weight * F.mse_loss(model(x), y)
        loss.backward()
    optimizer.step()
