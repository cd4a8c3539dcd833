"""Log-probabilities of words by one forward pass, and word by word with a cache."""

import torch
from torch import nn
from torch.nn import functional as F

import mezzo

torch.manual_seed(0)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, cache=None):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        if cache is not None:
            cache.append((k, v))
            k, v = (torch.cat(parts, 1) for parts in zip(*cache, strict=True))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=cache is None))


class Words(nn.Module):
    def __init__(self, words, width, depth):
        super().__init__()
        self.words, self.places, self.head = (
            nn.Embedding(words, width),
            nn.Embedding(20, width),
            nn.Linear(width, words),
        )
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))

    def forward(self, ids, caches=None, start=0):
        x = self.words(ids) + self.places(torch.arange(start, start + ids.shape[1]))
        for n, layer in enumerate(self.layers):
            x = layer(x, None if caches is None else caches[n])
        return self.head(x).log_softmax(-1)


model = Words(words=19, width=16, depth=3).eval()
ids = torch.randint(0, 19, (3, 8))
with torch.no_grad():
    mezzo.compare_point("log-probabilities", model(ids))
    caches = [[] for _ in model.layers]
    words = [model(ids[:, n : n + 1], caches, n) for n in range(8)]
    mezzo.compare_point("log-probabilities", torch.cat(words, 1))
