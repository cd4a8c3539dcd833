"""Do the claims of the paper "Mixed Precision Training" (arXiv:1710.03740) hold on a laptop?

1. FP16 weights without FP32 masters lose accuracy, because small updates round away (section 3.1).
2. Small gradients become zero in FP16, and a loss scale saves them (section 3.2).
3. Long sums of products need an FP32 accumulator (section 3.3).

The networks are small, so the figures are ours and not the paper's; the effects are the same. Seeds are fixed.
"""

from __future__ import annotations

import statistics
import warnings

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import mezzo
from benchmarks.shared.harness import report

STEPS, SEEDS, RATE = 3000, 3, 5e-4
TRAINED = 1500
ANCHORS = 8732
"""Boxes that SSD (Liu et al., arXiv:1512.02325) scores for a picture of 300 x 300 pixels; nearly all are background."""


def digits() -> tuple[Tensor, Tensor]:
    """Return the handwritten digits as rows of 64 pixels from 0 to 1, and their classes."""
    data = load_digits()
    return torch.tensor(data.data / 16.0, dtype=torch.float32), torch.tensor(data.target)


def accuracy(policy: str, seed: int) -> float:
    """Return the accuracy on digits that were not trained on, after training with a small learning rate under ``policy``."""
    images, labels = digits()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    session = mezzo.Session(model, optimizer, policy=policy)
    for _ in range(STEPS):
        chosen = torch.randint(0, TRAINED, (32,))
        with session.autocast():
            loss = F.cross_entropy(model(images[chosen]).float(), labels[chosen])
        session.step(loss)
    with torch.no_grad(), session.autocast():
        predicted = model(images[TRAINED:]).argmax(dim=1)
    return float((predicted == labels[TRAINED:]).float().mean())


def detector_gradients() -> Tensor:
    """Return the FP32 gradients of a detector's box scores: the loss is a mean over all boxes of a batch, most of them background."""
    generator = torch.Generator().manual_seed(0)
    batch = 32
    # The margin of background over the best class, as late in training.
    margin = 6 + 2 * torch.randn(batch * ANCHORS, generator=generator)
    scores = torch.stack([margin, torch.zeros_like(margin)], dim=1).requires_grad_()
    loss = F.cross_entropy(scores, torch.zeros(len(margin), dtype=torch.long))
    loss.backward()
    assert scores.grad is not None
    return scores.grad


def zeroed(values: Tensor, scale: float) -> float:
    """Return the share of non-zero ``values`` that become zero in FP16 at a loss scale."""
    scaled = (values * scale).half()
    return float(((scaled == 0) & (values != 0)).sum() / (values != 0).sum())


def dot_error(length: int, accumulator: torch.dtype) -> float:
    """Return the relative error of sums of ``length`` positive FP16 products, added one by one: the median of 64 sums."""
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.rand(64, length, generator=generator).half() for _ in range(2))
    products = left.to(accumulator) * right.to(accumulator)
    total = torch.zeros(64, dtype=accumulator)
    for column in products.unbind(1):
        total = total + column
    exact = (left.double() * right.double()).sum(dim=1)
    return float(((total.double() - exact) / exact).abs().median())


def main() -> None:
    warnings.simplefilter("ignore", mezzo.PrecisionWarning)
    rows: list[tuple[str, str, str]] = []
    for policy in ("fp32", "fp16-master", "fp16-pure", "bf16-master", "bf16-pure"):
        found = [accuracy(policy, seed) for seed in range(SEEDS)]
        spread = f"{statistics.median(found):.1%} ({min(found):.1%} to {max(found):.1%})"
        rows.append((f"1. accuracy after {STEPS} updates: {policy}", spread, ""))
    gradients = detector_gradients()
    for scale in (1, 8, 1024, 65536):
        what = f"2. gradients of a detector that become zero in FP16, loss scale {scale}"
        rows.append((what, f"{zeroed(gradients, scale):.1%}", ""))
    for length in (64, 1024, 16384):
        for name, dtype in (("FP16", torch.float16), ("FP32", torch.float32)):
            what = f"3. error of a sum of {length} products, accumulator {name}"
            rows.append((what, f"{dot_error(length, dtype):.2g}", ""))
    report("paper", rows, {})
