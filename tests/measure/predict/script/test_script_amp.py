"""A traced script's own mixed precision does not change its tapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers_predict import taped

SCRIPT = """
import torch
from torch import nn
import mezzo
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{made}
for _ in range(4):
    optimizer.zero_grad()
    {step}
"""
PLAIN = "model(torch.randn(8, 8)).square().mean().backward(); optimizer.step()"
OWN = """with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.randn(8, 8)).float().square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()"""
OFF = """with torch.autocast("cpu", enabled=False):
        target = torch.zeros(8, 4)
    (model(torch.randn(8, 8)) - target).square().mean().backward()
    optimizer.step()"""
SESSION = """with session.autocast():
        loss = model(torch.randn(8, 8)).square().mean()
    session.step(loss)"""


@pytest.mark.parametrize(
    ("made", "step", "policy"),
    [
        ("scaler = torch.amp.GradScaler('cpu')", OWN, "fp32"),
        ("scaler = torch.amp.GradScaler('cpu', 65536.0, 2.0, 0.5, 2000, True)", OWN, "bf16"),
        ("", OFF, "bf16"),
        ("session = mezzo.Session(model, optimizer, policy='fp16')", SESSION, "bf16"),
        ("session = mezzo.Session(model, optimizer, policy='fp16')", SESSION, "fp32"),
    ],
)
def test_products_are_those_of_the_script_without_it(made: str, step: str, policy: str, tmp_path: Path) -> None:
    kinds = []
    for words in ({"made": "", "step": PLAIN}, {"made": made, "step": step}):
        tape = taped(tmp_path, SCRIPT.format(**words), policy=policy, steps=2)
        kinds.append([(op.name, op.format, op.flops) for op in tape.operations if op.flops])
    assert kinds[0] == kinds[1]
    assert {form for _, form, _ in kinds[1]} == {policy}
