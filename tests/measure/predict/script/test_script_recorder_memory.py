"""What takes the GPU's memory besides a script's model, and what its loaders run, which takes none."""

from __future__ import annotations

from pathlib import Path

import pytest

from mezzo.measure.predict.script.process import record_script
from mezzo.measure.predict.script.tapes import ScriptTape, TapeRequest
from mezzo.measure.predict.tape_memory import bytes_by_kind

SCRIPT = """
import copy
import torch
from torch import nn
{before}
data, labels = torch.randn(1000, 64){data}, torch.zeros(1000, dtype=torch.long){data}
model = nn.Linear(64, 10, bias=False).cuda()
{beside}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(0, 64, 8):
    {loop}
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    if i // 8 % {every} == {every} - 1:
        optimizer.step()
        optimizer.zero_grad()
"""
PLAIN = {
    "before": "",
    "data": "",
    "beside": "",
    "loop": "x, y = data[i : i + 8].cuda(), labels[i : i + 8].cuda()",
    "every": "1",
}
WEIGHTS, BATCH, DATA = 64 * 10 * 4, 8 * 64 * 4 + 8 * 8, 1000 * 64 * 4 + 1000 * 8


def _taped(tmp_path: Path, **parts: str) -> ScriptTape:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(**{**PLAIN, **parts}), encoding="utf-8")
    return record_script(TapeRequest(script=str(path), arguments=(), policy="fp32"))


@pytest.mark.parametrize(
    ("parts", "parameters", "inputs"),
    [
        ({}, WEIGHTS, BATCH),
        ({"loop": "x, y = data[i : i + 8].to('cuda'), labels[i : i + 8].to('cuda')"}, WEIGHTS, BATCH),
        ({"every": "2"}, WEIGHTS, BATCH),
        ({"beside": "average = copy.deepcopy(model)"}, 2 * WEIGHTS, BATCH),
        ({"beside": "teacher = nn.Linear(64, 20, bias=False).cuda().eval()"}, 3 * WEIGHTS, BATCH),
        ({"beside": "queue = torch.randn(16, 64, device='cuda')"}, WEIGHTS, BATCH + 16 * 64 * 4),
        ({"data": ".cuda()"}, WEIGHTS, DATA),
        (
            {"data": ".cuda()", "loop": "x, y = data[torch.arange(8)], labels[torch.arange(8)]"},
            WEIGHTS,
            8 * 64 * 4 + DATA,
        ),
        ({"beside": "gone = torch.randn(16, 64, device='cuda'); del gone"}, WEIGHTS, BATCH),
    ],
)
def test_what_lies_on_the_gpu_counts_once(parts: dict[str, str], parameters: int, inputs: int, tmp_path: Path) -> None:
    tape = _taped(tmp_path, **parts).tape
    assert tape is not None
    found = bytes_by_kind(tape, until=tape.backward_starts[-1] - 1)
    assert (found["parameters"], found["inputs"]) == (parameters, inputs)


LOADED = {
    "before": """
from torch.utils.data import DataLoader, Dataset
class Flip(nn.Module):
    def forward(self, x):
        return x.flip(-1) if torch.rand(1) < 0.5 else x * 2
class Data(Dataset):
    flip = Flip()
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return {made}, 0
loader = iter(DataLoader(Data(), batch_size=8))""",
    "loop": "x, y = next(loader); x, y = x.cuda(), y.cuda()",
}


@pytest.mark.parametrize("every", ["1", "2"])
def test_a_module_that_prepares_samples_is_the_hosts(every: str, tmp_path: Path) -> None:
    """The transforms of torchvision are modules in training mode."""
    made = [
        _taped(tmp_path, loop=LOADED["loop"], before=LOADED["before"].replace("{made}", sample), every=every)
        for sample in ("self.flip(torch.randn(64))", "torch.randn(64)")
    ]
    for one in made:
        assert one.tape is not None
        assert (one.num_steps, one.batch, one.num_batches) == (2, 8, int(every))
        assert {op.name for op in one.tape.operations} & {"rand", "flip", "stack"} == set()
    assert made[0].tape is not None
    assert made[1].tape is not None
    assert made[0].tape.operations == made[1].tape.operations
    assert made[0].tape.events == made[1].tape.events
