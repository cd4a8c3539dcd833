"""A training in several processes for each exchange of a contract: ``contract_ranks.py ROLE planted|healthy``.

ROLE: hook (of DistributedDataParallel), reduction and gather (of fully_shard), by_hand, or one_rank, whose second process differs.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

role, planted = sys.argv[1], sys.argv[2] == "planted"
dist.init_process_group("gloo")
dist.barrier()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
model[2].register_forward_pre_hook(lambda last, args: (args[0].to(last.weight.dtype),) if role == "one_rank" else None)
if role == "hook":
    model = nn.parallel.DistributedDataParallel(model)
    if planted:
        model.register_comm_hook(None, fp16_compress_hook)
elif role in ("reduction", "gather"):
    narrow = {"reduce_dtype": torch.bfloat16} if role == "reduction" else {"param_dtype": torch.bfloat16}
    wide = {"reduce_dtype": torch.float32}
    precision = MixedPrecisionPolicy(**{**wide, **(narrow if planted else {})})
    fully_shard(model[2], mp_policy=precision)
    fully_shard(model)
if role == "one_rank" and planted and dist.get_rank() == 1:
    model[2].to(torch.bfloat16)  # PLANTED one_rank
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(3):
    outputs = model(torch.randn(4, 8))  # PLANTED gather
    optimizer.zero_grad()
    outputs.float().square().mean().backward()  # PLANTED hook reduction
    if role == "by_hand":
        for p in model.parameters():
            dist.all_reduce(p.grad)
    optimizer.step()
dist.barrier()  # a process that has exchanged nothing may be ahead of the others
dist.destroy_process_group()
