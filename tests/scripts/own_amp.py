"""A script with its own autocast and GradScaler, by their new or old names."""

import sys
import warnings

import torch
from common import batches, mlp, norm, report
from torch.nn import functional as F

names, init_scale = sys.argv[1], float(sys.argv[2])
model = mlp(6, 16, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused="fused" in names or None)
if names == "old":
    warnings.simplefilter("ignore", FutureWarning)
    from torch.cuda.amp import GradScaler, autocast

    scaler = GradScaler(init_scale=init_scale)
    context = autocast
else:
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)

    def context():
        return torch.autocast("cpu", dtype=torch.float16)


inputs, targets = batches(1)[0]
losses, norms, scales, dtypes, autocasts = [], [], [], set(), set()
for _ in range(12):
    optimizer.zero_grad()
    with context():
        autocasts.add(torch.is_autocast_enabled("cpu"))
        predicted = model(inputs)
        dtypes.add(str((predicted @ predicted.T).dtype))  # an operation outside any module
        loss = F.mse_loss(predicted.float(), targets)
    scaler.scale(loss).backward()
    if names != "fused":
        scaler.unscale_(optimizer)
        norms.append(norm(model.parameters()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    scales.append(scaler.get_scale())
report(losses=losses, norms=norms, scales=scales, dtypes=sorted(dtypes), autocasts=sorted(autocasts))
