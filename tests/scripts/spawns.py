"""Start processes that train: ``spawns.py METHOD [WHAT]``; METHOD is mp.spawn, or a start method of multiprocessing.

WHAT happens in rank 1 at the third step: raise.
"""

import multiprocessing
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn import functional as F

SIZE = 2


def train(rank, folder, what):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=SIZE)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)
    for step in range(6):
        if what == "raise" and rank == 1 and step == 2:
            raise ValueError("bad batch")
        loss = F.cross_entropy(model(torch.randn(8, 16, generator=data)), torch.randint(0, 4, (8,), generator=data))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


def main():
    method, what = [*sys.argv[1:], ""][:2]
    folder = os.environ["MEETING"]
    if method == "mp.spawn":
        torch.multiprocessing.spawn(train, args=(folder, what), nprocs=SIZE)
        return
    started = [
        multiprocessing.get_context(method).Process(target=train, args=(rank, folder, what)) for rank in range(SIZE)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join()
    sys.exit(max(process.exitcode for process in started))


if __name__ == "__main__":
    main()
