"""Accelerate: prepared objects, accumulation with a short last window, its clipping call and its scheduler."""

import argparse

import torch
from accelerate import Accelerator
from common import batches, mlp, report
from torch.nn import functional as F

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=12)
options.add_argument("--accumulate", type=int, default=1)
options.add_argument("--precision", default="no")
options = options.parse_args()

accelerator = Accelerator(cpu=True, mixed_precision=options.precision, gradient_accumulation_steps=options.accumulate)
model = mlp(6, 16, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
loader = torch.utils.data.DataLoader(batches(1) * options.steps, batch_size=None)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
losses, rates, steps = [], [], 0
for inputs, targets in loader:
    with accelerator.accumulate(model):
        loss = F.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            steps += 1
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    losses.append(loss.item())
report(losses=losses, rates=rates, steps=steps)
