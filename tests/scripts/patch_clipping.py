"""A trainer class: loss in a helper, clipping under a condition, a checkpoint that is saved and loaded."""

import tempfile
from pathlib import Path

import torch
from torch import nn


class Trainer:
    def __init__(self, clip=1.0):
        torch.manual_seed(0)
        self.device = torch.device("cpu")
        self.model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 2)).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.clip = clip

    def compute_loss(self, batch):
        inputs, targets = (part.to(self.device) for part in batch)
        return ((self.model(inputs) - targets) ** 2).mean()

    def train_step(self, batch):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.compute_loss(batch)
        loss.backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def validate(self, batches):
        total = 0.0
        for batch in batches:
            total += self.compute_loss(batch).item()
        return total / len(batches)

    def save(self, path):
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, path)

    def load(self, path):
        state = torch.load(path)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


trainer = Trainer()
data = [(torch.randn(8, 6), torch.randn(8, 2)) for _ in range(4)]
with tempfile.TemporaryDirectory() as folder:
    for epoch in range(3):
        for batch in data:
            trainer.train_step(batch)
        trainer.save(Path(folder) / "last.pt")
        trainer.load(Path(folder) / "last.pt")
        print(epoch, trainer.validate(data))
