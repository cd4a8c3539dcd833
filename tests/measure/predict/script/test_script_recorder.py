"""What a recorder sees inside a script: masters, numbers that are read, layouts, several models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from helpers_predict import kept_bytes, recorded, tape_of, taped
from mezzo.measure.predict.script.recorder import RecordingComplete, ScriptRecorder
from mezzo.measure.predict.script.tapes import TapeRequest


def _train(watch: ScriptRecorder, *, channels_last: bool = False, second: bool = False) -> None:
    with watch.watching():
        try:
            model: nn.Module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.LayerNorm(6), nn.Flatten(), nn.Linear(288, 10))
            head = nn.Linear(10, 4) if second else nn.Identity()
            if channels_last:
                model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            trained = [*model.parameters(), *(head.parameters() if second else ())]
            optimizer = torch.optim.AdamW(trained)
            for _ in range(5):
                optimizer.zero_grad()
                loss = (head(model(torch.randn(2, 3, 8, 8))) if second else model(torch.randn(2, 3, 8, 8))).sum()
                if loss > 3:
                    raise AssertionError("a condition on a traced tensor is false")
                loss.backward()
                optimizer.step()
        except RecordingComplete:
            return
    raise AssertionError("not stopped")


CONV, NORM, LINEAR, HEAD = 3 * 8 * 9 + 8, 12, 288 * 10 + 10, 44


def test_masters_keep_32_bits_and_the_model_has_16() -> None:
    watch = ScriptRecorder(TapeRequest(script=__file__, arguments=(), policy="fp16-master"))
    _train(watch)
    tape = watch.tape
    found = kept_bytes(tape)
    assert found["parameters"] == 2 * (CONV + LINEAR) + 4 * NORM
    assert found["optimizer"] == 4 * (CONV + LINEAR) + 8 * (CONV + LINEAR + NORM)
    products = {op.format for op in tape.operations if op.flops}
    assert products == {"fp16"}


def test_the_lines_that_read_numbers_are_kept() -> None:
    watch = ScriptRecorder(TapeRequest(script=__file__, arguments=(), policy="fp32"))
    _train(watch)
    assert [line.split(":")[0] for line in watch.read_at] == ["test_script_recorder.py"]


def test_the_layout_is_that_of_the_script() -> None:
    for channels_last in (False, True):
        watch = ScriptRecorder(TapeRequest(script=__file__, arguments=(), policy="fp32"))
        _train(watch, channels_last=channels_last)
        assert watch.channels_last == channels_last


def test_a_second_model_of_the_step_is_allocated() -> None:
    watch = ScriptRecorder(TapeRequest(script=__file__, arguments=(), policy="fp32"))
    _train(watch, second=True)
    found = kept_bytes(watch.tape)
    assert found["parameters"] == 4 * (CONV + NORM + LINEAR + HEAD)


# --- What takes the GPU's memory besides a script's model, and what its loaders run, which takes none ---


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
PLAIN = {"before": "", "data": "", "beside": "", "every": "1"}
PLAIN["loop"] = "x, y = data[i : i + 8].cuda(), labels[i : i + 8].cuda()"
DRAWN = "x, y = data[torch.arange(8)], labels[torch.arange(8)]"
WEIGHTS, BATCH, DATA = 64 * 10 * 4, 8 * 64 * 4 + 8 * 8, 1000 * 64 * 4 + 1000 * 8


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
        ({"data": ".cuda()", "loop": DRAWN}, WEIGHTS, 8 * 64 * 4 + DATA),
        ({"beside": "gone = torch.randn(16, 64, device='cuda'); del gone"}, WEIGHTS, BATCH),
    ],
)
def test_what_lies_on_the_gpu_counts_once(parts: dict[str, str], parameters: int, inputs: int, tmp_path: Path) -> None:
    found = kept_bytes(taped(tmp_path, SCRIPT.format(**{**PLAIN, **parts})))
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
    tapes = []
    for sample in ("self.flip(torch.randn(64))", "torch.randn(64)"):
        before = LOADED["before"].replace("{made}", sample)
        parts = {**PLAIN, "loop": LOADED["loop"], "before": before, "every": every}
        one = recorded(tmp_path, SCRIPT.format(**parts))
        assert (one.num_steps, one.batch, one.num_batches) == (2, 8, int(every))
        tapes.append(tape_of(one))
        assert {op.name for op in tapes[-1].operations} & {"rand", "flip", "stack"} == set()
    assert tapes[0].operations == tapes[1].operations
    assert tapes[0].events == tapes[1].events


DROPS = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5))
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_cpu_runs_operations_of_its_own(tmp_path: Path) -> None:
    """A GPU has one kernel for dropout, and updates all parameters together."""
    here, on_gpu = (
        [op.name for op in taped(tmp_path, DROPS, on_cpu=on_cpu, gpu_present=False).operations]
        for on_cpu in (True, False)
    )
    assert "native_dropout" in on_gpu
    assert "native_dropout" not in here
    assert any(name.startswith("_foreach") or name.startswith("foreach") for name in on_gpu) != any(
        "foreach" in name for name in here
    )
