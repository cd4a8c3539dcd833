"""What a traced script saves does not replace its files, and is returned when the script loads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers_predict import recorded

SCRIPT = """
import io
import torch
from torch import nn
model = nn.Linear(8, 2).cuda()
optimizer = torch.optim.Adam(model.parameters())
for step in range(4):
    loss = model(torch.randn(4, 8, device="cuda")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    {saved}
"""
WAYS = {
    "state": "torch.save(model.state_dict(), FILE); model.load_state_dict(torch.load(FILE, map_location='cuda'))",
    "checkpoint": "torch.save({'step': step, 'model': model.state_dict(), 'optimizer': optimizer.state_dict()}, FILE); "
    "found = torch.load(FILE, weights_only=True); optimizer.load_state_dict(found['optimizer']); assert found['step'] == step",
    "whole model": "torch.save(model, FILE); model.load_state_dict(torch.load(FILE, weights_only=False).state_dict())",
    "file": "with open(FILE, 'ab') as file: torch.save(model.state_dict(), file)\n    model.load_state_dict(torch.load(FILE))",
    "buffer": "file = io.BytesIO(); torch.save(model.state_dict(), file); file.seek(0); "
    "model.load_state_dict(torch.load(file, map_location=lambda storage, place: storage))",
}


@pytest.mark.parametrize("saved", WAYS.values(), ids=WAYS)
def test_a_file_is_left_alone_and_what_was_saved_is_loaded(saved: str, tmp_path: Path) -> None:
    kept = tmp_path / "model.pt"
    kept.write_bytes(b"of an earlier run")
    assert recorded(tmp_path, SCRIPT.format(saved=saved.replace("FILE", repr(str(kept))))).num_steps == 2
    assert kept.read_bytes() == b"of an earlier run"
