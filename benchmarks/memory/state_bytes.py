"""How many bytes does a parameter take between two updates: weight, gradient, master and moments?"""

from __future__ import annotations

import warnings

import torch
from torch import nn

import mezzo
from benchmarks.shared.harness import report

CASES = [
    # policy, moments, rounding, target
    ("fp16-master", "fp32", "nearest", "16 or less"),
    ("bf16-master", "fp32", "nearest", "14 or less"),
    ("fp16-master", "8bit", "nearest", "10.1 or less"),
    ("bf16-master", "8bit", "nearest", "8.1 or less"),
    ("bf16-pure", "bf16", "stochastic", "8 or less"),
    ("bf16-pure", "8bit", "stochastic", "6.1 or less"),
]


def main() -> None:
    warnings.simplefilter("ignore", mezzo.PrecisionWarning)
    rows = [
        (
            f"{policy}, moments={moments}, rounding={rounding}",
            f"{bytes_a_parameter(policy, moments, rounding):.2f}",
            target,
        )
        for policy, moments, rounding, target in CASES
    ]
    report("state_bytes", rows, {})


def bytes_a_parameter(policy: str, moments: str, rounding: str) -> float:
    """Return the bytes per parameter of everything that exists between two updates, in a small network without norms."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    optimizer = mezzo.AdamW(model.parameters(), moments=moments, rounding=rounding)  # type: ignore[arg-type]
    session = mezzo.Session(model, optimizer, policy=f"{policy}:arithmetic=emulated")
    gradients: list[torch.Tensor] = []
    for _ in range(2):
        with session.autocast():
            loss = model(torch.randn(32, 256)).float().square().mean()
        session.backward(loss)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        session.update()
    state = [t for own in optimizer.state.values() for t in own.values() if t.ndim]  # no step counts
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in [*model.parameters(), *gradients, *state]
    }
    return sum(storages.values()) / sum(p.numel() for p in model.parameters())
