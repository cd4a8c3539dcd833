"""Warnings of torch name the script's line, once each, whatever Mezzo's hooks do."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """import torch
from torch import nn
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(12):
    loss = model(torch.randn(32, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch.std(torch.ones(1))
    torch.std(torch.ones(1))
    nn.functional.mse_loss(torch.ones(3), torch.ones(3, 1))
"""
WARNED = re.compile(r"^(\S+):(\d+): UserWarning: (std|Using)", re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("command", [["run", "--policy", "bf16"], ["audit"]])
def test_a_warning_names_the_scripts_line(command: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = [sys.executable, "-m", "mezzo", *command, "--out", str(tmp_path / "out"), str(script)]
    shown = subprocess.run(words, capture_output=True, text=True, check=True)
    found = WARNED.findall(shown.stdout + shown.stderr)
    assert sorted((Path(file).name, int(line), what) for file, line, what in found) == [
        ("train.py", 10, "std"),
        ("train.py", 11, "std"),
        ("train.py", 12, "Using"),
    ]
