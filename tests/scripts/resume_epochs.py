"""A training in a function that saves after each epoch, with augmentation and an average of its own: ``--without`` names what it loses."""

import argparse
import json
import os
import random
import time

import torch
from torch import nn
from torch.nn import functional as F


class Average:
    def __init__(self, model):
        self.shadow = {name: value.clone() for name, value in model.state_dict().items()}

    def update(self, model):
        for name, value in model.state_dict().items():
            self.shadow[name] = 0.9 * self.shadow[name].float() + 0.1 * value.float()


class Augmented(torch.utils.data.Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(count, 1, 8, 8, generator=generator)
        self.labels = torch.randint(0, 3, (count,), generator=generator)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        return (image.flip(-1) if random.random() < 0.5 else image), self.labels[index]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--without", default="")
    lacks = parser.parse_args().without
    if lacks != "seed":
        torch.manual_seed(3)
        random.seed(3)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    average, first, best, began = Average(model), 0, 1e9, time.time()
    loader = torch.utils.data.DataLoader(Augmented(40), batch_size=8, shuffle=True)
    validation = torch.utils.data.DataLoader(Augmented(16), batch_size=8)
    os.makedirs("saved", exist_ok=True)
    if os.path.exists("saved/last.pth"):
        found = torch.load("saved/last.pth", weights_only=False)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        first, best = found["epoch"] + 1, found["best"]
        if lacks != "scheduler":
            scheduler.load_state_dict(found["scheduler"])
        if lacks != "average":
            average.shadow = found["average"]
        if lacks not in ("random", "seed"):
            torch.set_rng_state(found["torch"])
            random.setstate(found["random"])
    for epoch in range(first, 4):
        model.train()
        total, seen = 0.0, 0
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            average.update(model)
            total += loss.item()
            seen += len(images)
        scheduler.step()
        model.eval()
        with torch.no_grad():
            score = sum(F.cross_entropy(model(images), labels).item() for images, labels in validation)
        if score < best:
            best = score
            torch.save(model.state_dict(), "saved/best.pth")
        with open("log.json", "a") as log:
            log.write(json.dumps([epoch, total, seen, score, time.time() - began]) + "\n")
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "average": average.shadow,
                "epoch": epoch,
                "best": best,
                "torch": torch.get_rng_state(),
                "random": random.getstate(),
            },
            "saved/last.pth",
        )


main()
