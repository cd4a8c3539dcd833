"""A script that compiles is predicted as it runs without compilation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers_predict import recorded, tape_of
from mezzo.measure.predict.script.tapes import ScriptTape

SCRIPT = """
import torch
from torch import nn
{before}
model = nn.Linear(8, 2)
{made}
optimizer = torch.optim.AdamW(model.parameters(), capturable={capturable})
for step in range(4):
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    {inside}
"""


def _recorded(folder: Path, **parts: Any) -> ScriptTape:
    known = {"before": "", "made": "", "inside": "", "capturable": False}
    return recorded(folder, SCRIPT.format(**known | parts))


@pytest.mark.parametrize(
    ("parts", "names"),
    [
        ({"made": "model = torch.compile(model, mode='max-autotune', fullgraph=True)"}, ["torch.compile"]),
        ({"made": "model.compile()"}, ["Module.compile"]),
        ({"made": "model = torch.jit.script(model)"}, ["torch.jit.script"]),
        ({"made": "model = torch.jit.trace(model, torch.randn(4, 8))"}, ["torch.jit.trace"]),
        (
            {"before": "@torch.compile(dynamic=True)\ndef twice(x):\n    return 2 * x", "inside": "twice(loss)"},
            ["torch.compile"],
        ),
        ({"capturable": True}, []),
    ],
)
def test_what_is_compiled_has_the_tape_of_what_is_not(
    parts: dict[str, object], names: list[str], tmp_path: Path
) -> None:
    own = torch.compile
    plain, found = _recorded(tmp_path), _recorded(tmp_path, **parts)
    assert torch.compile is own
    assert tape_of(found).operations == tape_of(plain).operations
    assert (plain.compiles, found.compiles) == ([], names)
