"""A script that compiles is predicted as it runs without compilation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mezzo.measure.predict.script.process import record_script
from mezzo.measure.predict.script.tapes import ScriptTape, TapeRequest

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


def _taped(
    tmp_path: Path, *, before: str = "", made: str = "", inside: str = "", capturable: bool = False
) -> ScriptTape:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(before=before, made=made, inside=inside, capturable=capturable), encoding="utf-8")
    return record_script(TapeRequest(script=str(path), arguments=(), policy="fp32"))


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
    plain, found = _taped(tmp_path), _taped(tmp_path, **parts)  # type: ignore[arg-type]
    assert torch.compile is own
    assert found.tape is not None
    assert plain.tape is not None
    assert found.tape.operations == plain.tape.operations
    assert (plain.compiles, found.compiles) == ([], names)
