"""What do fewer bits of weights and moments cost, in final loss and time?

The task is to fit a random function with a small network, AdamW with a linearly falling learning rate, 400 updates. It is short enough
for several seeds, and sensitive: rounding BF16 weights to nearest doubles the final loss. Arithmetic is emulated, so that the numerics
are a GPU's.
"""

from __future__ import annotations

import functools
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import mezzo
from benchmarks.shared.harness import interleave, median_ms, ratio, report, spread, summary
from benchmarks.shared.models import resnet50_shapes
from benchmarks.speed.optimizers import one_pass

SEEDS, STEPS, LR = 4, 400, 3e-3
CASES = [
    ("fp32", "fp32", "nearest", ""),
    ("fp32", "bf16", "nearest", ""),
    ("fp32", "8bit", "nearest", ""),
    ("fp16-master", "8bit", "nearest", ""),
    ("bf16-master", "fp32", "nearest", "14.1 or less"),
    ("bf16-master", "8bit", "nearest", ""),
    ("bf16-pure", "fp32", "nearest", ""),
    ("bf16-pure", "bf16", "stochastic", "8 or less"),
    ("bf16-pure", "8bit", "stochastic", "8 or less"),
]


def main() -> None:
    warnings.simplefilter("ignore", mezzo.PrecisionWarning)
    rows, data = [], {}
    exact: list[float] = []
    for policy, moments, rounding, target in CASES:
        build = functools.partial(adamw, moments=moments, rounding=rounding)
        ends = [train(build, policy, seed) for seed in range(SEEDS)]
        losses = [loss for loss, _ in ends]
        exact = exact or losses
        shares = [a / b for a, b in zip(losses, exact, strict=True)]
        against = summary(shares)
        what = f"{policy}, moments={moments}, rounding={rounding}"
        rows.append((f"{what}: bytes a parameter", f"{ends[0][1]:.2f}", target))
        rows.append((f"{what}: final loss against FP32", spread(against), ""))
        data[what] = {"bytes_a_parameter": ends[0][1], "loss_against_fp32": against}
    pieces = {moments: one_pass(resnet50_shapes(), None, moments=moments) for moments in ("fp32", "bf16", "8bit")}
    times = interleave(pieces, rounds=7)
    for moments in ("bf16", "8bit"):
        what = f"AdamW on 25.6 M FP16 weights with masters, moments={moments}: time against FP32 moments"
        rows.append((what, spread(ratio(times, moments, "fp32")), ""))
    report("low_memory", rows, {"cases": data, "median_ms": median_ms(times)})


def adamw(model: nn.Module, **storage: Any) -> mezzo.AdamW:
    return mezzo.AdamW(model.parameters(), lr=LR, **storage)


def train(build: Callable[[nn.Module], torch.optim.Optimizer], policy: str, seed: int) -> tuple[float, float]:
    """Return the mean loss of the last 20 updates, and the bytes per parameter of weights, gradients and state."""
    torch.manual_seed(seed)
    inputs = torch.randn(512, 16)
    targets = torch.sin(inputs @ torch.randn(16, 4))
    model = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 4))
    optimizer = build(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    session = mezzo.Session(model, optimizer, policy=f"{policy}:arithmetic=emulated")
    last, held = [], 0
    for step in range(STEPS):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - step / STEPS)
        with session.autocast():
            loss = nn.functional.mse_loss(model(inputs).float(), targets)
        session.backward(loss)
        held = sum(p.nbytes + p.grad.nbytes for p in model.parameters() if p.grad is not None)
        session.update()
        last.append(loss.item())
    held += sum(t.nbytes for state in optimizer.state.values() for t in state.values() if t.ndim)
    return statistics.fmean(last[-20:]), held / sum(p.numel() for p in model.parameters())
