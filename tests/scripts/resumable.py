"""A script as people write them: epochs, validation, a schedule, a moving average, the best score, a history, checkpoints."""

import argparse
import copy
import hashlib
import os
import random
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--sleep", type=float, default=0.0)
parser.add_argument("--checkpoint")
args = parser.parse_args()
torch.manual_seed(0)
random.seed(0)
np.random.seed(0)


class Meter:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def add(self, value):
        self.total += value
        self.count += 1


class Augmented(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.1 * random.random() + 0.1 * float(np.random.rand()), y


data = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
labels = (data.sum(1) > 0).long()
train_loader = DataLoader(Augmented(data[:48], labels[:48]), batch_size=6, shuffle=True)
val_loader = DataLoader(TensorDataset(data[48:], labels[48:]), batch_size=8)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
ema = copy.deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=args.epochs * 8)


def validate():
    model.eval()
    hits = 0
    with torch.no_grad():
        for x, y in val_loader:
            hits += (model(x).argmax(1) == y).sum().item()
    return hits / 16


def main():
    best, history, step, meter = 0.0, [], 0, Meter()
    for epoch in range(args.epochs):
        model.train()
        running = 0.0
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            if step == 5:
                for group in optimizer.param_groups:
                    group["weight_decay"] = 0.05
            optimizer.step()
            scheduler.step()
            with torch.no_grad():
                for slow, fast in zip(ema.parameters(), model.parameters()):
                    slow.lerp_(fast, 0.1)
            running += loss.item()
            meter.add(loss.item())
            step += 1
            if str(step) == os.environ.get("DIE_AT"):
                os.kill(os.getpid(), 9)
            time.sleep(args.sleep)
        score = validate()
        history.append((epoch, running, score))
        if score > best:
            best = score
            if args.checkpoint:
                torch.save(model.state_dict(), args.checkpoint)
        print(
            f"epoch {epoch} loss {running / len(train_loader):.17g} score {score} best {best} step {step}", flush=True
        )
    digest = hashlib.sha256(repr([history, best, step, meter.total, meter.count]).encode())
    for tensor in [*model.state_dict().values(), *ema.state_dict().values()]:
        digest.update(tensor.numpy().tobytes())
    digest.update(repr([random.random(), np.random.rand(), torch.rand(1)]).encode())
    print("result", digest.hexdigest(), flush=True)


main()
