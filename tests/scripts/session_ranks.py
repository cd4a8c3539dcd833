"""A session in one or several gloo processes: ``session_ranks.py ddp|fsdp|one FOLDER save|load|stop|rewind``.

``save`` saves after 5 of 10 updates, ``load`` goes on from there. Under ``stop`` and ``rewind``, rank 1 alone has a far too large loss from
update 61 on.
"""

import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import mezzo

kind, folder, mode = sys.argv[1:4]
rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
part = slice(8 * rank // size, 8 * (rank + 1) // size)
if kind != "one":
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
if kind == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
if kind == "fsdp":
    from torch.distributed.fsdp import fully_shard

    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
guard = mode if mode in ("stop", "rewind") else None
accumulate = 1 if guard else 2
session = mezzo.Session(
    model,
    mezzo.AdamW(model.parameters(), lr=0.01),
    policy="fp16:fp32=linear",
    accumulate=accumulate,
    clip_norm=1.0,
    guard=guard,
)
generator = torch.Generator().manual_seed(7)
inputs = torch.randn(20, 8, 6, generator=generator)
targets = torch.randint(0, 3, (20, 8), generator=generator)


def step(number: int, more: float = 0.0) -> None:
    with session.autocast():
        loss = F.cross_entropy(model(inputs[number % 20][part]), targets[number % 20][part])
    session.step(loss + more)


made, ended = 0, ""
if mode == "save":
    for made in range(20):
        step(made)
        if made == 9:
            session.save(folder).wait()
elif mode == "load":
    loaded = session.load(folder)
    for made in range(10, 20):
        step(made)
else:
    warnings.simplefilter("ignore")
    try:
        for made in range(300):
            step(made, 100.0 if rank == 1 and made >= 60 else 0.0)
            if made in (20, 50):
                session.save(folder).wait()
    except mezzo.errors.GuardError as error:
        ended = error.message
whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
total = sum(p.detach().double().abs().sum().item() for p in whole)
rewinds = [] if session.guardrails is None else [one.snapshot for one in session.guardrails.rewinds]
sys.stdout.write(
    f"RANK {rank} made {made} weights {total!r} updates {session.updates} rewinds {rewinds} ended {ended}\n"
)
sys.stdout.flush()
if dist.is_initialized():
    dist.destroy_process_group()
