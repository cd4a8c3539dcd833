"""A small training with everything that a snapshot has to keep: dropout, batch norm, shuffling, augmentation, windows, a schedule."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import mezzo
from mezzo import Session

EPOCHS, BATCHES, ACCUMULATE = 3, 7, 3
CALLS = EPOCHS * BATCHES
"""Backward passes of a whole run. Windows of three do not fit the passes of seven: most saves lie inside one."""


class Noisy(Dataset[Any]):
    """Samples with noise from all three global generators."""

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = random.random() + float(np.random.rand()) + torch.rand(6)
        return torch.arange(6.0) * index / 20 + 0.1 * noise, index % 3


class Net(nn.Module):
    """Convolution, batch norm, dropout, and a counter that is in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 16), nn.BatchNorm1d(16)
        self.conv, self.last = nn.Conv2d(1, 4, 3), nn.Linear(4 * 2 * 2, 3)
        self.tied = self.last
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1.0
        x = nn.functional.dropout(self.norm(self.first(x)), 0.3, self.training) * (1 + self.seen / 100)
        return self.last(self.conv(x.reshape(-1, 1, 4, 4)).flatten(1))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return mezzo.AdamW(parameters, lr=0.01)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "mezzo.AdamW": adamw,
    "mezzo.SGD": lambda p: mezzo.SGD(p, lr=0.05, momentum=0.9),
    "mezzo.AdamW 8bit": lambda p: mezzo.AdamW(p, lr=0.01, moments="8bit"),
    "mezzo.AdamW bf16": lambda p: mezzo.AdamW(p, lr=0.01, moments="bf16", amsgrad=True),
    "torch.AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4),
    "torch.SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "torch.Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-4),
    "stochastic": lambda p: mezzo.AdamW(p, lr=0.01, rounding="stochastic"),
}


def built(
    policy: str = "fp16", optimizer: Callable[[Any], torch.optim.Optimizer] = adamw, *, workers: int = 0, **options: Any
) -> tuple[Session, DataLoader[Any]]:
    """Return a session and its loader, always the same."""
    torch.manual_seed(0)
    random.seed(1)
    np.random.seed(2)
    net = Net().to(memory_format=torch.channels_last)
    updates = optimizer(net.parameters())
    schedule = torch.optim.lr_scheduler.MultiStepLR(updates, milestones=[2, 5], gamma=0.5)
    session = Session(net, updates, policy=policy, accumulate=ACCUMULATE, clip_norm=1.0, scheduler=schedule, **options)
    generator = torch.Generator().manual_seed(5)
    return session, DataLoader(Noisy(), batch_size=4, shuffle=True, generator=generator, num_workers=workers)


def train(
    session: Session,
    loader: DataLoader[Any],
    *,
    calls: int = CALLS,
    after: Callable[[Session, int], None] | None = None,
) -> list[float]:
    """Train until the session has had ``calls`` backward passes in all; return the losses of those made here."""
    losses: list[float] = []
    made = session.state.position.epoch * BATCHES + session.state.position._batch
    for _ in range(session.epoch, EPOCHS):
        if made == calls:
            break
        for x, y in session.batches(loader):
            with session.autocast():
                loss = nn.functional.cross_entropy(session.models[0](x), y)
            weight = 3.0 if made == 4 else 4.0
            session.step(loss, weight=weight)
            losses.append(loss.item())
            made += 1
            if after is not None:
                after(session, made)
            if made == calls:
                break
    return losses


def final_bits(session: Session) -> list[Tensor]:
    """Return copies of everything that a run ends with."""
    inner = session.models[0]
    state = session.optimizers[0].state_dict()["state"]
    moments = [v for n in sorted(state) for _, v in sorted(state[n].items()) if isinstance(v, Tensor)]
    held = [*inner.parameters(), *inner.buffers(), *moments, torch.get_rng_state()]
    numbers = torch.tensor([session.loss_scale, session.grad_norm, session.updates, session.skipped, random.random()])
    return [t.detach().clone() for t in [*held, numbers, torch.from_numpy(np.random.rand(2))]]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Return whether two lists have the same bytes."""
    pairs = list(zip(a, b, strict=True))
    return all(x.dtype is y.dtype and x.shape == y.shape and torch.equal(_bytes(x), _bytes(y)) for x, y in pairs)


def with_checksum(header: dict[str, Any], data: bytes) -> bytes:
    """Return a snapshot file with a right checksum, whatever is in it."""
    header["__metadata__"]["crc32"] = "0" * 8
    text = json.dumps(header, separators=(",", ":")).encode()
    length = len(text).to_bytes(8, "little")
    crc = f'"crc32":"{zlib.crc32(length + text + data):08x}"'.encode()
    return length + text.replace(b'"crc32":"00000000"', crc) + data


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def stopped_and_resumed(folder: Path, at: int, **how: Any) -> tuple[list[float], Session]:
    """Train to ``at`` backward passes, save, forget everything, build anew, load, train to the end."""
    session, loader = built(**how)
    losses = train(session, loader, calls=at, after=lambda s, made: _save_at(s, made, at, folder))
    session.state.snapshots.folder.release()  # type: ignore[union-attr]
    again, loader = built(**how)
    torch.rand(17), random.random(), np.random.rand(3)  # what happens to be drawn before the load
    again.load(folder)
    torch.rand(3)
    return losses + train(again, loader), again


def _save_at(session: Session, made: int, at: int, folder: Path) -> None:
    if made == at:
        saving = session.save(folder)
        assert saving is not None
        saving.wait()
