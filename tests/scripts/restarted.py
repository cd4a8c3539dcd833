"""Two processes over gloo: ``restarted.py HOW MARKER [fsdp]``; each rank says what it ended with.

HOW: no; or what rank 1 does once in all, when both have a snapshot: kill itself, kill mezzo (its own), or hang; or told: MARKER appears at
step 20, and steps are slow from there on. DistributedDataParallel, or ``fully_shard``.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    how, marker, sharded = sys.argv[1], Path(sys.argv[2]), "fsdp" in sys.argv
    dist.init_process_group("gloo", timeout=timedelta(seconds=15) if how == "hang" else None)
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(96, 6), torch.randint(0, 3, (96,)))
    model: nn.Module = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))
    if sharded:
        fully_shard(model[0])
    model = fully_shard(model) if sharded else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.8)
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    torch.manual_seed(rank)  # other masks of dropout in each process
    step, seen = 0, 0.0
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            step, seen = step + 1, seen + float(loss)
            if how == "told" and step == 20 and rank == 1:
                marker.touch()
            time.sleep(0.2 if how == "told" and step >= 20 else 0.02)
            if (
                rank == 1
                and step == 31
                and how in ("kill", "kill mezzo", "hang")
                and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
            ):
                lose_rank_1(how, marker)
    whole = [p.full_tensor() if sharded else p for p in model.parameters()]
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in whole)).hexdigest()
    print(f"RANK {rank} steps {step} seen {seen!r} weights {digest}\n", end="", flush=True)
    dist.destroy_process_group()


def lose_rank_1(how: str, marker: Path) -> None:
    """Lose it once both ranks have a snapshot."""
    while any(not list(Path(f"out/snapshots/rank-{rank}-of-2").glob("*.safetensors")) for rank in (0, 1)):
        time.sleep(0.02)
    marker.touch()
    if how == "hang":
        time.sleep(10_000)
    os.kill(os.getpid() if how == "kill" else os.getppid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
