"""A loop in a stream that it chose: ``python streams_script.py DEVICE KIND``; every fifth step is long.

KIND is ``stream``, ``default`` for no other stream, or ``out of memory``.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext

import torch
from torch import nn

STEPS, BUSY_CYCLES = 24, 200_000_000


def main(device: str, kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(512, 64).to(device), torch.randint(8, (512,)).to(device)
    busy = []
    if kind == "stream":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
    for number in range(STEPS):
        with torch.cuda.stream(stream) if kind == "stream" else nullcontext():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            if number >= 10 and number % 5 == 0 and device == "cuda":
                torch.cuda._sleep(BUSY_CYCLES)
                busy.append(number)
            if kind == "out of memory" and number == 5:
                torch.empty(1 << 42, dtype=torch.uint8, device=device)
            optimizer.step()
    if device == "cuda":
        torch.cuda.synchronize()
    print(json.dumps({"busy": busy}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
