import torch
from common import batches, mlp, report
from torch.nn import functional as F

model = mlp(6, 16, 2).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, targets = (t.double() for t in batches(1)[0])
losses = []
for _ in range(8):
    optimizer.zero_grad()
    predicted = model(inputs)
    loss = F.mse_loss(predicted, targets)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses=losses, dtype=str(predicted.dtype))
