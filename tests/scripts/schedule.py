"""Schedulers stepped every update, and every epoch of three updates."""

import sys

import torch
from common import batches, mlp, report
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedulers

kind, per_epoch = sys.argv[1], sys.argv[2] == "epoch"
model = mlp(6, 16, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
if kind == "step":
    scheduler = schedulers.StepLR(optimizer, 1, gamma=0.5)
elif kind == "onecycle":
    scheduler = schedulers.OneCycleLR(optimizer, max_lr=0.2, total_steps=12)
elif kind == "sequential":
    parts = [schedulers.ConstantLR(optimizer, 0.5, 2), schedulers.ExponentialLR(optimizer, 0.9)]
    scheduler = schedulers.SequentialLR(optimizer, parts, milestones=[3])
elif kind == "plateau":
    scheduler = schedulers.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
elif kind == "own":

    class Halving(schedulers.StepLR):
        def step(self, epoch=None):
            super().step()

    scheduler = Halving(optimizer, 1, gamma=0.5)
inputs, targets = batches(1)[0]
losses, rates = [], []
for update in range(12):
    optimizer.zero_grad()
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    rates.append(optimizer.param_groups[0]["lr"])
    if not per_epoch or update % 3 == 2:
        scheduler.step(loss.item()) if kind == "plateau" else scheduler.step()
report(losses=losses, rates=rates)
