"""Three losses that share a graph, each with its own backward pass, before one update."""

import torch
from common import batches, mlp, norm, report
from torch.nn import functional as F

model = mlp(6, 16, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, targets = batches(1)[0]
losses, norms = [], []
for _ in range(12):
    optimizer.zero_grad()
    predicted = model(inputs)
    first, second = F.mse_loss(predicted, targets), F.l1_loss(predicted, targets)
    first.backward(retain_graph=True)
    second.backward(retain_graph=True)
    torch.autograd.backward([first, second], [torch.tensor(0.5), torch.tensor(0.25)])
    norms.append(norm(model.parameters()))
    optimizer.step()
    losses.append(first.item() + second.item())
report(losses=losses, norms=norms)
