import sys

import torch
from common import batches, mlp, report
from torch.nn import functional as F

model = mlp(6, 16, 2)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if sys.argv[1] == "before":
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model.to(device)
else:
    model(batches(1)[0][0])  # a first look at the output's shape, where the model was made
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
inputs, targets = (t.to(device) for t in batches(1)[0])
losses = []
for _ in range(12):
    optimizer.zero_grad()
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses=losses)
