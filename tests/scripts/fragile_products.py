"""Layers of which single products lose everything in blocks: a plant for each layer, ``forward``, ``dgrad``, ``wgrad``, ``all``, ``none``.

Every 16th number of one direction is ``outlier`` times the others and meets zeros, so that BF16 loses nothing, and a block with such a
number nothing else. Only a product that sums in this direction has it in its blocks: over inputs, over outputs or over rows.

Arguments: the outlier, the width, the plants.
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F


class Planted(nn.Module):
    def __init__(self, plant, outlier, width):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.plants = ("forward", "dgrad", "wgrad") if plant == "all" else (plant,)
        self.register_buffer("large", torch.ones(width).index_fill(0, torch.arange(0, width, 16), outlier))
        with torch.no_grad():
            if "forward" in self.plants:
                self.linear.weight[:, ::16] = 0
            if "dgrad" in self.plants:
                self.linear.weight[::16] = 0

    def forward(self, x):
        inputs, outputs, rows = (
            self.large if plant in self.plants else torch.ones_like(self.large)
            for plant in ("forward", "dgrad", "wgrad")
        )
        return self.linear(x * inputs * (rows == 1)[:, None]) * outputs * rows[:, None]


outlier, width, plants = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
torch.manual_seed(0)
model = nn.Sequential(*[Planted(plant, outlier, width) for plant in plants], nn.Linear(width, width))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-8)
for batch in torch.randn(4, width, width):
    optimizer.zero_grad()
    loss = F.mse_loss(model(batch), batch.roll(1, 0))
    loss.backward()
    optimizer.step()
    print(loss.item())
