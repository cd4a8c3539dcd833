"""The functions that the lint observes are the ones that torch's own libraries call."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mezzo.launch.torch import switched
from mezzo.launch.torch.lint_hooks import REDUCTIONS
from processes import leave_process_group

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")


@pytest.mark.parametrize("folder", ["fsdp", "algorithms/ddp_comm_hooks"])
def test_every_reduction_of_gradients_is_observed(folder: str) -> None:
    sources = [path.read_text(encoding="utf-8") for path in (Path(dist.__file__).parent / folder).rglob("*.py")]
    called = {name for source in sources for name in re.findall(r"\bdist\.(\w*reduce\w*)\(", source)}
    assert called
    assert called <= REDUCTIONS.keys()


def train_sharded(rank: int, folder: Path, reduced_in: torch.dtype) -> None:
    """Train in one of two processes; the first writes down what the lint found."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with switched(None) as (run, _):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 2))
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced_in))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(8, 6)).float().square().mean().backward()
            optimizer.step()
    if rank == 0:
        found = {finding.code: finding.detail for finding in run.lint.findings()}
        (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")
    leave_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(("reduced_in", "numbers"), [(torch.bfloat16, "578 BF16"), (torch.float32, "")])
def test_two_processes_reduce_in_the_format_that_they_were_told(
    reduced_in: torch.dtype, numbers: str, tmp_path: Path
) -> None:
    """The model has 6 * 64 + 64 + 64 * 2 + 2 = 578 weights."""
    torch.multiprocessing.spawn(train_sharded, (tmp_path, reduced_in), 2)
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found.keys() == ({"A631"} if numbers else set())
    assert all(f" of {numbers} gradients" in detail for detail in found.values())
