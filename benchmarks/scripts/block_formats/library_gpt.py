"""A small GPT that learns the source of Python's standard library, character by character; its loss is a mean over every step's batch."""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LAYERS, LENGTH, BATCH = 64, 4, 2, 64, 16
CHARACTERS = 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.character, self.place = nn.Embedding(CHARACTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHARACTERS)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.character(text) + self.place.weight)))


def source() -> Tensor:
    """Return the files of the standard library's top folder as characters, in the order of their names; others than ASCII are left out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    return torch.tensor([character for character in text if character < CHARACTERS])


def train() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    text, model = source(), GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH, 1))
        rows = text[starts + torch.arange(LENGTH + 1)]
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


train()
