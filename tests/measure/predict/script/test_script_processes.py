"""Scripts that share their training among GPUs are traced as the first process of their job."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from helpers_predict import kept_bytes, recorded, tape_of
from mezzo.measure.predict.script.tapes import ScriptTape, TapeRequest, recorded_tapes

SCRIPT = """
import os
import torch
import torch.distributed as dist
from torch import nn
{before}
def train(rank, size=1):
    {begin}
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)).cuda(rank)
    own = model
    {wrap}
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    for step in range(4):
        loss = model(torch.randn(4, 8).cuda(rank)).square().mean()
        optimizer.zero_grad()
        {inside}
        loss.backward()
        optimizer.step()
{run}
"""
PLAIN = {"before": "", "begin": "pass", "wrap": "pass", "inside": "pass", "run": "train(0)"}
JOIN = "dist.init_process_group('nccl', rank=rank, world_size=size, init_method='tcp://127.0.0.1:1')"
BY_LAUNCHER = {"begin": "dist.init_process_group('nccl')", "run": "train(int(os.environ['LOCAL_RANK']))"}
DDP = "model = nn.parallel.DistributedDataParallel(model, device_ids=[rank])"
WEIGHTS = 8 * 16 + 16 + 16 * 2 + 2


def _recorded(tmp_path: Path, *, launched: bool = False, **parts: str) -> ScriptTape:
    return recorded(tmp_path, SCRIPT.format(**{**PLAIN, **parts}), launched=launched)


def _operations(made: ScriptTape) -> list[tuple[object, ...]]:
    return [(op.name, op.phase, op.format, op.shape) for op in tape_of(made).operations]


@pytest.mark.parametrize(
    "parts",
    [
        {"begin": JOIN, "wrap": DDP},
        {"begin": JOIN, "wrap": "from torch.nn.parallel import DistributedDataParallel as DDP; model = DDP(model)"},
        {"begin": f"{JOIN}; dist.barrier()", "inside": "dist.all_reduce(loss.detach())"},
        {
            "begin": JOIN,
            "run": "import torch.multiprocessing as mp; mp.spawn(train, args=(1,), nprocs=torch.cuda.device_count())",
        },
        {"begin": JOIN, "run": "torch.multiprocessing.spawn(train, args=(4,), nprocs=4)"},
        {"wrap": "model = nn.DataParallel(model)"},
        {"wrap": "net = model; model = lambda x: nn.parallel.data_parallel(net, x, range(1))"},
        {"wrap": "net = model; model = lambda x: nn.parallel.data_parallel(net, (x,), range(1))"},
    ],
)
def test_one_process_runs_what_a_script_for_one_gpu_runs(parts: dict[str, str], tmp_path: Path) -> None:
    assert _operations(_recorded(tmp_path, **parts)) == _operations(_recorded(tmp_path))
    assert not torch.distributed.is_initialized()


def test_a_script_finds_the_files_beside_it_before_all_others(tmp_path: Path) -> None:
    path = list(sys.path)
    _recorded(tmp_path, before=f"import sys; assert sys.path == {[str(tmp_path.resolve()), *path[1:]]!r}")
    assert sys.path == path


@pytest.mark.parametrize(("view", "buckets"), [("False", 4 * WEIGHTS), ("True", 0)])
def test_gradients_lie_in_buckets_as_well(view: str, buckets: int, tmp_path: Path) -> None:
    wrap = DDP.replace("])", f"], gradient_as_bucket_view={view})")
    found = kept_bytes(tape_of(_recorded(tmp_path, begin=JOIN, wrap=wrap)))
    assert (found["parameters"], found.get("buffers", 0)) == (4 * WEIGHTS, buckets)


@pytest.mark.slow
def test_a_launcher_is_stood_in_for_where_the_script_needs_one(tmp_path: Path) -> None:
    before = dict(os.environ)
    made = _recorded(tmp_path, launched=True, **BY_LAUNCHER)
    assert dict(os.environ) == before
    (found,) = recorded_tapes([TapeRequest(script=str(tmp_path / "train.py"), arguments=(), policy="fp32")])
    assert found.launched
    assert _operations(found) == _operations(made) == _operations(_recorded(tmp_path))
