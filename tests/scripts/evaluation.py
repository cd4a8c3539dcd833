"""An evaluation between updates: under no_grad, under inference_mode, and one with gradients on that is thrown away."""

import torch
from common import batches, mlp, report
from torch import nn
from torch.nn import functional as F

model = nn.Sequential(mlp(6, 16, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses, evaluated, dtypes = [], [], set()
held_out = batches(1, seed=9)[0]
for inputs, targets in batches(12):
    model.train()
    optimizer.zero_grad()
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    model.eval()
    for context in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with context:
            predicted = model(held_out[0])
            dtypes.add(str(predicted.dtype))
            evaluated.append(F.mse_loss(predicted, held_out[1]).item())
report(losses=losses, evaluated=evaluated, dtypes=sorted(dtypes))
