"""A script that was written for one GPU and asks nothing: devices, streams, events, NCCL, a compiled part, and its own AMP."""

import os
import warnings

import torch
import torch.distributed as dist
from common import report
from torch import nn

warnings.simplefilter("ignore")  # torch says that there is no CUDA
torch.manual_seed(0)
torch.cuda.manual_seed_all(0)
torch.cuda.set_device(0)
os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
device = torch.device("cuda:0")


@torch.compile(backend="aot_eager")
def features(x):
    return torch.cat([x.to("cuda"), torch.ones(len(x), 2, device="cuda")], dim=1)


model = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)).cuda()
model = nn.parallel.DistributedDataParallel(model, device_ids=[0], output_device=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.cuda.amp.GradScaler()
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
loader = torch.utils.data.DataLoader(data, batch_size=16, pin_memory=True)
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
total = torch.zeros(1, device=0)
formats, losses = set(), []
start.record()
for x, y in loader:
    with torch.cuda.stream(torch.cuda.Stream()):
        x, y = x.pin_memory().cuda(non_blocking=True), y.to(device, non_blocking=True)
    optimizer.zero_grad(set_to_none=True)
    x = features(x)
    with torch.cuda.amp.autocast():
        output = model(x)
        loss = nn.functional.mse_loss(output, y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    total += loss.detach()
    formats.add(str(output.dtype).removeprefix("torch."))
    losses.append(loss.item())
end.record()
torch.cuda.synchronize()
assert start.elapsed_time(end) > 0
dist.barrier(device_ids=[0])
dist.destroy_process_group()
report(formats=sorted(formats) * 2, losses=losses)
