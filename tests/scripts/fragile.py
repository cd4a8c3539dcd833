"""Six blocks, one of which passes through values that FP16 cannot hold; dropout, clipping and random batches."""

import torch
from torch import nn
from torch.nn import functional as F


class Fragile(nn.Module):
    def forward(self, x):
        return (x * 1e-9) * 1e9


class Block(nn.Module):
    def __init__(self, last):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop, self.last = nn.Dropout(0.1), last

    def forward(self, x):
        return x + self.last(self.down(self.drop(F.gelu(self.up(self.norm(x))))))


torch.manual_seed(0)
model = nn.Sequential(*[Block(Fragile() if number == 4 else nn.Identity()) for number in range(6)], nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(20):
    optimizer.zero_grad()
    loss = F.mse_loss(model(torch.randn(16, 8)), torch.randn(16, 2))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(step, loss.item())
