import torch
from common import batches, mlp, norm, report
from torch.nn import functional as F

model = mlp(6, 16, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
losses, norms = [], []
for number, (inputs, targets) in enumerate(batches(24)):
    loss = F.mse_loss(model(inputs), targets) / 4
    loss.backward()
    losses.append(loss.item())
    if (number + 1) % 4 == 0:
        norms.append(norm(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
report(losses=losses, norms=norms)
