"""binary_cross_entropy of probabilities, as a module and as a function, some of them exactly 0 or 1 in 16 bits."""

import torch
from common import batches, mlp, report
from torch import nn
from torch.nn import functional as F

model = nn.Sequential(mlp(6, 16, 1), nn.Sigmoid())
criterion = nn.BCELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, targets = batches(1)[0]
labels = (targets[:, :1] > 0).float()
losses = []
for _ in range(8):
    optimizer.zero_grad()
    predicted = model(inputs)
    loss = criterion(predicted, labels) + F.binary_cross_entropy(predicted, labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses=losses)
