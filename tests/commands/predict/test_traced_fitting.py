"""What would fit after a script ran out of a GPU's memory: the largest batch by the predictor."""

from __future__ import annotations

from pathlib import Path

import pytest

from mezzo.cli.script import Script
from mezzo.commands.predict.traced import with_fits
from mezzo.records import OutOfMemory
from record_builders import run_record

TRAIN = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.zeros(512, 4096), torch.zeros(512, dtype=torch.long))
for x, y in torch.utils.data.DataLoader(data, batch_size=64):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def script(name: str) -> Script:
    return Script(target=name, arguments=None, as_module=False, out=None, log_to=None, as_json=False)


def test_a_run_that_had_memory_is_left_alone() -> None:
    record = run_record("fp32")
    assert with_fits(record, script("train.py"), "fp32") is record


def test_on_a_device_that_the_predictor_does_not_know_that_is_said() -> None:
    record = run_record("fp32", out_of_memory=OutOfMemory(step=3, message="none left"))
    here = record.environment.model_copy(update={"device": "cpu"})
    found = with_fits(record.model_copy(update={"environment": here}), script("train.py"), "fp32").out_of_memory
    assert found is not None
    assert [(one.what, one.value) for one in found.not_known] == [("largest batch", "not predicted")]


@pytest.mark.slow
def test_on_a_known_gpu_the_largest_batch_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN)
    record = run_record("fp32", out_of_memory=OutOfMemory(step=3, message="none left"))
    here = record.environment.model_copy(update={"device": "cuda", "gpu": "NVIDIA A100-SXM4-80GB"})
    found = with_fits(record.model_copy(update={"environment": here}), script("train.py"), "fp32").out_of_memory
    assert found is not None
    assert found.not_known == []
    assert [(one.value, "all of the data set" in one.reason) for one in found.settings] == [
        ("512 samples under fp32", True),
        ("512 samples under bf16", True),
    ]


@pytest.mark.slow
def test_memory_ends_the_largest_batch_of_a_large_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN.replace("512", "10_000_000"))
    record = run_record("fp32", out_of_memory=OutOfMemory(step=3, message="none left"))
    here = record.environment.model_copy(update={"device": "cuda", "gpu": "NVIDIA A100-SXM4-80GB"})
    found = with_fits(record.model_copy(update={"environment": here}), script("train.py"), "fp32").out_of_memory
    assert found is not None
    sizes = [int(one.value.split()[0]) for one in found.settings]
    assert 100_000 < sizes[0] <= sizes[1]  # 80 GB; a sample keeps 16 KiB of input, 16 KiB of activations
