"""How far are AdamW's FP32 weights from float64's after 10,000 updates, mezzo.AdamW's and torch's?"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import mezzo
from benchmarks.shared.harness import report, spread, summary

SEEDS, UPDATES, WEIGHTS, LR = 4, 10_000, 64, 1e-3


def main() -> None:
    torch.set_num_threads(1)
    rows, data = [], {}
    for decay in (0.0, 0.01, 0.1):
        shares = [torch_s / ours for ours, torch_s in (distances(decay, seed) for seed in range(SEEDS))]
        against = summary(shares)
        rows.append((f"weight_decay={decay:g}: torch's distance to float64 over ours", spread(against), "1 or more"))
        data[f"{decay:g}"] = against
    report("float64", rows, {"torch_s_distance_over_ours": data})


def distances(decay: float, seed: int) -> tuple[float, float]:
    """Return the distances of our and torch's final FP32 weights from float64's."""
    generator = torch.Generator().manual_seed(seed)
    start, goal = torch.randn(2, WEIGHTS, generator=generator)
    slopes = torch.logspace(-2, 1, WEIGHTS)
    ours, torch_s, exact = nn.Parameter(start.clone()), nn.Parameter(start.clone()), nn.Parameter(start.double())
    optimizers: list[torch.optim.Optimizer] = [mezzo.AdamW([ours], lr=LR, weight_decay=decay)]
    optimizers += [torch.optim.AdamW([p], lr=LR, weight_decay=decay, foreach=False) for p in (torch_s, exact)]
    for noise in torch.randn(UPDATES, WEIGHTS, generator=generator):
        gradient: Tensor = slopes * (exact.detach().float() - goal) + noise
        ours.grad, torch_s.grad, exact.grad = gradient, gradient, gradient.double()
        for optimizer in optimizers:
            optimizer.step()
    near, far = (float((p.double() - exact).norm().detach()) for p in (ours, torch_s))
    return near, far
