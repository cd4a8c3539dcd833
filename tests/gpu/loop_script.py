"""A training loop for commands on a GPU: ``python loop_script.py DEVICE VARIANT [PRECISION]``.

It computes in FP32, or with PRECISION in what it sets by hand: ``tf32``, ``bf16`` or ``fp16``, the last with a GradScaler. The losses
of two batches are a million times as large: at the scales of a run, FP16 gradients overflow there and nowhere else. Losses are read
once, at the end. From the 30th step on CUDA the device is kept busy for 2e8 cycles, a tenth of a second, while the host goes on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

STEPS, BATCH, BUSY_STEP, BUSY_CYCLES = 40, 32, 30, 200_000_000
OVERFLOWS = (5, 17)
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Net(nn.Module):
    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.first, self.norm, self.last = nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 10)
        self.block = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(F.gelu(self.first(x)))
        inner = checkpoint(self.block, hidden, use_reentrant=False) if self.checkpointed else self.block(hidden)
        return self.last(hidden + inner)


def batches(device: str, variant: str) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS * BATCH, 64, generator=generator)
    labels = torch.randint(10, (STEPS * BATCH,), generator=generator)
    if variant == "loader":
        data = torch.utils.data.TensorDataset(inputs, labels)
        loader = torch.utils.data.DataLoader(data, BATCH, num_workers=2, pin_memory=device == "cuda")
        for x, y in loader:
            yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        return
    inputs, labels = inputs.to(device), labels.to(device)
    yield from zip(inputs.split(BATCH), labels.split(BATCH), strict=True)


def train(device: str, variant: str, precision: str = "fp32") -> dict[str, Any]:
    """Return losses, which updates were skipped by the script's own scaler, and its scale."""
    torch.manual_seed(0)
    plain = Net(checkpointed=variant == "checkpoint").to(device)
    model: Any = torch.compile(plain, mode="default") if variant == "compiled" else plain
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=variant == "scaler")
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")
    cast = torch.autocast(device, FORMATS[precision]) if precision in FORMATS else nullcontext()
    losses, scales = [], []
    for number, (x, y) in enumerate(batches(device, variant)):
        optimizer.zero_grad()
        with cast:
            loss = F.cross_entropy(model(x), y)
        loss = loss * (1e6 if number in OVERFLOWS else 1.0)
        scaler.scale(loss).backward()
        if variant == "clip":
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        if number == BUSY_STEP and device == "cuda":
            torch.cuda._sleep(BUSY_CYCLES)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
        scales.append(scaler.get_scale() if precision == "fp16" else 1.0)
    skipped = [after < before for before, after in zip([65536.0, *scales], scales, strict=False)]
    return {"losses": torch.stack(losses).tolist(), "skipped": skipped if precision == "fp16" else [False] * STEPS}


def by_hand(device: str) -> None:
    """Print a line for every variant and precision that runs are compared with."""
    for precision in ("fp32", "tf32", "bf16", "fp16"):
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        for variant in ("plain", "clip", "checkpoint", "scaler"):
            line = {"precision": precision, "variant": variant}
            print(json.dumps(line | train(device, variant, precision)), flush=True)


if __name__ == "__main__":
    if sys.argv[2] == "by-hand":
        by_hand(sys.argv[1])
    else:
        print(json.dumps(train(*sys.argv[1:])), flush=True)
