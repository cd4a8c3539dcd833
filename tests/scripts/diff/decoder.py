"""A decoder with 112 modules, trained for two steps."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x):
        q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in self.project(x))
        return self.out(self.mix(q, k, v).transpose(1, 2).flatten(2))

    def project(self, x):
        return self.qkv(x).chunk(3, -1)

    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(width), Attention(width, 2), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.0))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, words, width, depth, length):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length + 1, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.score(self.norm(x))

    def score(self, x):
        return self.head(x)


def loss_of(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


model = Decoder(words=23, width=16, depth=10, length=12)
generator = torch.Generator().manual_seed(1)
# model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(2):
    ids = torch.randint(0, 23, (4, 12), generator=generator)
    optimizer.zero_grad()
    loss = loss_of(model(ids), ids)
    loss.backward()
    # gradients
    optimizer.step()
