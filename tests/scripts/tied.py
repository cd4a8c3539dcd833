"""One parameter in two modules, and a sparse embedding with its own optimizer if asked for."""

import sys

import torch
from common import report
from torch import nn
from torch.nn import functional as F

sparse = sys.argv[1] == "sparse"
torch.manual_seed(0)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.out = nn.Embedding(12, 8, sparse=sparse), nn.Linear(8, 8), nn.Linear(8, 12)
        if not sparse:
            self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(torch.tanh(self.body(self.embed(x))))


model = Words()
if sparse:
    dense = [*model.body.parameters(), *model.out.parameters()]
    optimizers = [torch.optim.SparseAdam(model.embed.parameters(), lr=0.02), torch.optim.Adam(dense, lr=0.02)]
else:
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.02)]
words, following = torch.randint(0, 12, (32,)), torch.randint(0, 12, (32,))
losses = []
for _ in range(12):
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = F.cross_entropy(model(words), following)
    loss.backward()
    norm = sum(
        float(p.grad.coalesce().values().norm() if p.grad.is_sparse else p.grad.norm()) for p in model.parameters()
    )
    for optimizer in optimizers:
        optimizer.step()
    losses.append(loss.item())
report(losses=losses, norm=norm)
