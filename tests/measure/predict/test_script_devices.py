"""Scripts written for a GPU are traced like the same scripts for a CPU, with torch's CPU build too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mezzo.measure.predict.script_devices import gpu_on_cpu
from mezzo.measure.predict.script_process import recorded
from mezzo.measure.predict.scripted import TapeRequest
from mezzo.policy import Policy

SCRIPT = """
import torch
from torch import nn

{before}
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)){model}
optimizer = torch.optim.AdamW(model.parameters())
x, y = torch.randn(12, 8{factory}), torch.zeros(12, dtype=torch.long{factory})
for step in range(4):
    a, b = x[:4]{data}, y[:4]{data}
    loss = nn.functional.cross_entropy(model(a), b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    {after}
"""
NONE = {"before": "", "model": "", "factory": "", "data": "", "after": "pass"}
WAYS: dict[str, dict[str, str]] = {
    "cuda()": {"model": ".cuda()", "data": ".cuda(non_blocking=True)"},
    "cuda(0)": {"model": ".cuda(0)", "data": ".cuda(0)"},
    "name": {"model": '.to("cuda")', "data": '.to("cuda", non_blocking=True)'},
    "number": {"model": ".to(0)", "data": ".to(0)"},
    "by keyword": {"model": '.to(device="cuda:0")', "data": '.to(device="cuda:0")'},
    "object": {"before": 'gpu = torch.device("cuda", 0)', "model": ".to(gpu)", "data": ".to(gpu)"},
    "object by number": {"before": "gpu = torch.device(0)", "model": ".to(gpu)", "data": ".to(gpu)"},
    "factories": {"model": ".cuda()", "factory": ', device="cuda"'},
    "numbers in factories": {"model": ".cuda()", "factory": ", device=0"},
    "default device": {"before": 'torch.set_default_device("cuda")'},
    "other accelerators": {"model": '.to("mps")', "data": '.to("xpu:1")'},
    "pinned": {"model": ".cuda()", "data": ".pin_memory().cuda()"},
    "questions": {
        "before": "torch.cuda.set_device(0); torch.cuda.manual_seed_all(1)",
        "model": ".cuda()",
        "data": ".cuda()",
        "after": "torch.cuda.synchronize(); 1 / (1 + torch.cuda.max_memory_allocated()); torch.cuda.empty_cache()",
    },
    "events": {
        "before": "begin, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]; begin.record()",
        "model": ".cuda()",
        "data": ".cuda()",
        "after": "end.record(); torch.cuda.current_stream().wait_event(end); 1 / begin.elapsed_time(end)",
    },
    "streams": {
        "before": "side = torch.cuda.Stream()",
        "model": ".cuda()",
        "data": ".cuda()",
        "after": "\n    with torch.cuda.stream(side):\n        side.wait_stream(torch.cuda.current_stream())",
    },
}


def traced(folder: Path, **parts: str) -> list[Any]:
    path = folder / "train.py"
    path.write_text(SCRIPT.format(**{**NONE, **parts}), encoding="utf-8")
    try:
        found = recorded(TapeRequest(script=str(path), arguments=[], policy="fp16"), Policy.parse("fp16"))
    finally:
        torch.set_default_device(None)  # the trace ends inside the script's loop
    assert found.error == ""
    assert found.tape is not None
    return [(op.name, op.phase, op.module, op.format, op.shape) for op in found.tape.operations]


@pytest.mark.parametrize("parts", WAYS.values(), ids=WAYS)
def test_a_script_for_a_gpu_has_the_tape_of_one_for_a_cpu(parts: dict[str, str], tmp_path: Path) -> None:
    assert traced(tmp_path, **parts) == traced(tmp_path)


def test_it_ends_with_the_block() -> None:
    own = torch.cuda.synchronize
    with gpu_on_cpu():
        assert torch.ones(2, device="cuda").cuda().to("cuda:1").device.type == "cpu"
        assert torch.ones(2, device="meta").to("meta").device.type == "meta"
    assert torch.cuda.synchronize is own
    if torch.version.cuda is None:
        with pytest.raises((RuntimeError, AssertionError)):
            torch.ones(2).to("cuda")
