"""Checkpointed modules in two processes under DistributedDataParallel: the same gradients and weights to the bit.

Run as a script, this is one of the two processes: ``as_rank.py test_checkpointing_ddp.py FOLDER``.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mezzo
from forked_processes import in_forks

POLICIES = ["fp32", "fp16", "bf16", "bf16-master", "fp8"]
PLANS = ["none", "full", "selective", "5KiB"]
WORLD = 2


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the input and what the layers add."""
        result: Tensor = x + self.layers(x)
        return result


def trained(policy: str, plan: str, rank: int) -> tuple[list[Tensor], int]:
    """Train on this process's batches; return gradients, weights and running statistics, and how many modules are checkpointed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), *(Block(8) for _ in range(3)), nn.Linear(8, 1))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2, eps=1e-4)
    session = mezzo.Session(ddp, optimizer, policy=policy)
    how = {"plan": plan} if not plan.endswith("B") else {"budget": plan}
    made = mezzo.checkpoint(ddp, torch.randn(6, 4), policy=policy, **how)  # type: ignore[arg-type]
    torch.manual_seed(1 + rank)
    found: list[Tensor] = []
    for _ in range(3):
        with session.autocast():
            loss = ddp(torch.randn(6, 4)).float().square().mean()
        session.step(loss)
        found.append(loss.detach())
    tensors = (*model.parameters(), *model.buffers())
    return [*found, *(tensor.detach().clone() for tensor in tensors)], len(made.regions)


def main(folder: str) -> None:
    """Train under every policy and plan, and leave what was found."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank = dist.get_rank()
    try:
        found = {f"{policy} {plan}": trained(policy, plan, rank) for policy in POLICIES for plan in PLANS}
        torch.save(found, f"{folder}/rank{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[list[Tensor], int]]]:
    folder = tmp_path_factory.mktemp("ddp")
    ended = in_forks([str(folder)], program=[__file__], size=WORLD, timeout_s=300)
    assert [one.code for one in ended] == [0] * WORLD, ended
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(WORLD)]


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS[1:])
@pytest.mark.parametrize("policy", POLICIES)
def test_two_processes_train_the_same(ranks: list[dict[str, tuple[list[Tensor], int]]], policy: str, plan: str) -> None:
    for found in ranks:
        plain, none = found[f"{policy} none"]
        mine, num_regions = found[f"{policy} {plan}"]
        assert none == 0
        assert num_regions > 0 or (plan.endswith("B") and policy != "fp32")  # in 16 bits all may fit
        assert all(torch.equal(one, other) for one, other in zip(mine, plain, strict=True))
    weights = [found[f"{policy} {plan}"][0][3] for found in ranks]
    losses = [found[f"{policy} {plan}"][0][0] for found in ranks]
    assert torch.equal(*weights)
    assert not torch.equal(*losses)  # each process has its own batches


if __name__ == "__main__":
    main(sys.argv[1])
