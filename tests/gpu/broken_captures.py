"""Capture a step that may be refused: ``python broken_captures.py DEVICE WHAT``; a failed capture may break CUDA for its process."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mezzo


class Net(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.first, self.block, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        if self.what == "checkpoint":
            hidden = checkpoint(self.block, hidden, use_reentrant=False)
        return self.last(hidden)


def replayed_dropout(device: str) -> dict[str, Any]:
    """Return the losses of replays at a rate of 0: only dropout tells them apart; and which share it keeps."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.25)).to(device)
    session = mezzo.Session(model, mezzo.SGD(model.parameters(), lr=0.0), policy="bf16")
    x, kept = torch.randn(256, 64, device=device), torch.zeros((), device=device)

    def loss_of(x: Tensor) -> Tensor:
        y = model(x).float()
        kept.copy_((y != 0).float().mean())
        return (y * y).mean()

    step = session.capture(loss_of, x)
    losses, shares = [], []
    for _ in range(8):
        losses.append(step(x).item())
        shares.append(kept.item())
    return {"losses": losses, "kept": shares}


def tried(device: str, what: str) -> dict[str, Any]:
    """Return whether the step was captured, else the error; and whether an eager step runs afterwards."""
    torch.manual_seed(0)
    model = Net(what).to(device)
    called: Any = torch.compile(model, mode="reduce-overhead") if what == "reduce-overhead" else model
    session = mezzo.Session(model, mezzo.AdamW(model.parameters(), lr=1e-3), policy="bf16")
    x, y = torch.randn(32, 64, device=device), torch.randint(8, (32,), device=device)
    capturing = False

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(called(x).float(), y)
        if what == "item":
            loss.item()
        if what == "out of memory" and capturing:
            torch.empty(1 << 42, dtype=torch.uint8, device=device)
        return loss

    def eager() -> Tensor:
        with session.autocast():
            loss = loss_of(x, y)
        session.step(loss)
        return loss

    alive = eager()  # with its graph of autograd's nodes, on the default stream
    if what == "live loss":
        with session.autocast():
            alive = loss_of(x, y)
    else:
        del alive
    capturing, found = True, {"captured": True, "error": "", "hint": ""}
    try:
        session.capture(loss_of, x, y)(x, y)
        torch.cuda.synchronize()
    except Exception as error:
        found = {
            "captured": False,
            "error": type(error).__name__,
            "message": str(error)[:500],
            "hint": getattr(error, "hint", ""),
        }
    capturing = False
    try:
        eager()
        torch.cuda.synchronize()
        return found | {"eager": True}
    except Exception as error:
        return found | {"eager": False, "after": f"{type(error).__name__}: {error}"[:500]}


if __name__ == "__main__":
    device, what = sys.argv[1:]
    print(json.dumps(replayed_dropout(device) if what == "dropout" else tried(device, what)), flush=True)
