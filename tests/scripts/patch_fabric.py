"""Lightning's Fabric."""

import logging
import warnings

import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lightning.fabric import Fabric

warnings.filterwarnings("ignore", module="lightning")
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
fabric = Fabric(accelerator="auto", devices=1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
inputs, targets = (fabric.to_device(part) for part in (torch.randn(8, 6), torch.randn(8, 2)))
for _ in range(8):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    fabric.backward(loss)
    optimizer.step()
