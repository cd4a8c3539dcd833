"""Accelerate's own checkpoints in the middle of an epoch: the order of a shuffled epoch comes back only with its seedable sampler."""

import argparse
import json
import os

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--seedable", action="store_true")
args = parser.parse_args()
place = "ckpt/where.json"
loaders = DataLoaderConfiguration(use_seedable_sampler=args.seedable)
accelerator = Accelerator(cpu=True, dataloader_config=loaders)
torch.manual_seed(7)
inputs = torch.randn(64, 8)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model = nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
first_epoch, first_step = 0, 0
if os.path.exists(place):
    accelerator.load_state("ckpt")
    with open(place) as file:
        first_epoch, first_step = json.load(file)
for epoch in range(first_epoch, 2):
    loader.set_epoch(epoch)
    for step, (x, y) in enumerate(loader):
        if epoch == first_epoch and step < first_step:
            continue
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        if step % 3 == 2:
            accelerator.save_state("ckpt")
            with open(place, "w") as file:
                json.dump([epoch, step + 1], file)
