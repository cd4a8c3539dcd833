"""Five public reports of runs that differ, rebuilt small: what was wrong, and the operation that the report found."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from helpers_diff import values_of
from mezzo.commands.diff.answer import answer
from mezzo.commands.diff.judge import judge

HEAD = """
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
"""
ROTARY = (
    HEAD
    + """
class Rotary(nn.Module):
    def forward(self, x):
        half = x.shape[-1] // 2
        frequencies = 1.0 / (10000 ** (torch.arange(half) / half))
        positions = torch.arange(x.shape[1]).float()
        angles = torch.outer(positions, frequencies)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.rotary, self.out = nn.Linear(16, 16), Rotary(), nn.Linear(16, 4)
    def forward(self, x):
        return self.out(self.rotary(self.inner(x)))
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    loss = model(torch.randn(2, 600, 16)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
)
BLOCK = (
    HEAD
    + """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.post = nn.RMSNorm(16, eps=1e-6)
    def forward(self, x):
        return x + self.post(self.down(F.gelu(self.gate(x), approximate="tanh") * self.up(x)))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.Sequential(Block(), Block()), nn.Linear(16, 4)
    def forward(self, x):
        return self.out(self.blocks(x))
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    inputs, labels = torch.randn(8, 16), torch.randint(0, 4, (8,))
    optimizer.zero_grad()
    for x, y in zip(inputs.chunk(2), labels.chunk(2)):
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
    optimizer.step()
"""
)
CACHED = (
    HEAD
    + """
import mezzo
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.cache = []
    def forward(self, x):
        q, k, v = [z.view(2, -1, 2, 8).transpose(1, 2) for z in self.qkv(x).chunk(3, -1)]
        if self.cache:
            k, v = torch.cat([self.cache[0], k], 2), torch.cat([self.cache[1], v], 2)
        self.cache = [k, v]
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] == k.shape[2]).transpose(1, 2).flatten(2)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.attention, self.out = nn.Embedding(20, 16), Attention(), nn.Linear(16, 20)
    def forward(self, tokens):
        return self.out(self.attention(self.inner(tokens)))
model, tokens = Model(), torch.randint(0, 20, (2, 6))
with torch.no_grad():
    out = [model(tokens[:, :4]), model(tokens[:, 4:5]), model(tokens[:, 5:])]
    mezzo.compare_point("logprobs", torch.cat(out, 1).log_softmax(-1))
"""
)


class Report(NamedTuple):
    source: str
    script: str
    right: str
    wrong: str
    begins: str
    """Operation, module, phase."""
    by: str


REPORTS = [
    Report(
        "https://github.com/EleutherAI/gpt-neox/issues/1003",
        ROTARY,
        "torch.outer(positions, frequencies)",
        "torch.outer(positions.half(), frequencies.half()).float()",
        "mul rotary forward",
        "operations",
    ),
    Report(
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/4661",
        BLOCK,
        'F.gelu(self.gate(x), approximate="tanh")',
        "F.gelu(self.gate(x))",
        "gelu blocks.0 forward",
        "settings",
    ),
    Report(
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5712",
        BLOCK,
        "eps=1e-6",
        "eps=1e-5",
        "add blocks.0.post forward",
        "settings",
    ),
    Report(
        "https://github.com/NVIDIA-NeMo/Automodel/issues/3829",
        BLOCK,
        "F.cross_entropy(model(x), y) / 2",
        "F.cross_entropy(model(x), y)",
        "loss (script) forward",
        "operations",
    ),
    Report(
        "https://github.com/pytorch/pytorch/issues/103082",
        CACHED,
        "is_causal=q.shape[2] == k.shape[2]",
        "is_causal=True",
        "scaled_dot_product_attention attention forward",
        "settings",
    ),
]


@pytest.mark.parametrize("report", REPORTS, ids=lambda one: one.source.split("github.com/")[1])
def test_the_operation_that_a_public_report_found_is_named(report: Report) -> None:
    assert report.script.count(report.right) == 1
    a, b = values_of(report.script), values_of(report.script.replace(report.right, report.wrong))
    again, control = values_of(report.script), values_of(report.script, mirrored=True)
    found = judge(a, b, again=again, control=control)
    first = answer(a, b, found, control=control, control_of_b=False)["beginnings"][0]
    assert (f"{first.b.op} {first.b.module} {first.b.phase}", first.by) == (report.begins, report.by)
