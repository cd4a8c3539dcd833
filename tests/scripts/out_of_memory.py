"""A training that runs out of memory: in the forward pass of a step, by a fake or really; or that goes on with half a batch."""

import sys

import torch
from torch import nn

how, at = sys.argv[1], int(sys.argv[2])
MESSAGE = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB"


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == at:
            if how == "really":
                return x + torch.empty(2**46)
            raise torch.OutOfMemoryError(MESSAGE)
        return x


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), Failing(), nn.Linear(256, 8))
optimizer = torch.optim.Adam(model.parameters())
for _ in range(6):
    x = torch.randn(128, 64)
    try:
        loss = model(x).square().mean()
    except torch.OutOfMemoryError:
        if how != "caught":
            raise
        print("half a batch")
        loss = model(x[:64]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("finished")
