"""Every kind of seed, dropout, and a DataLoader that shuffles: prints the order of the data."""

import random

import numpy as np
import torch
from common import report
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
random.seed(a=1)
np.random.seed(seed=2)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
data = TensorDataset(torch.arange(24), torch.linspace(0, 1, 96).reshape(24, 4))
order, losses = [], []
for _ in range(2):
    for numbers, inputs in DataLoader(data, batch_size=6, shuffle=True):
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        order += numbers.tolist()
        losses.append(loss.item())
drawn = {
    "torch": torch.rand(()).item(),
    "generator": torch.rand((), generator=torch.Generator().manual_seed(7)).item(),
    "random": random.random(),
    "numpy": float(np.random.rand()),
    "default_rng": float(np.random.default_rng(seed=4).random()),
    "split": random.Random(3).random(),
}
report(order=order, losses=losses, drawn=drawn)
