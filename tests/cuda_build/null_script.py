"""A training script for GPUs that compute nothing; it writes what it asked of them to a file, as JSON.

Usage: ``python null_script.py FILE DEVICE [own]``; ``own`` is a loop with autocast and a scaler of its own.
"""

import ctypes
import json
import os
import sys
from pathlib import Path

before_line_1 = ctypes.CDLL(None).null_gpu_calls(b"")

import torch  # noqa: E402
from null_model import Loss, Net, calls  # noqa: E402

STEPS = 12
device, own = sys.argv[2], "own" in sys.argv[3:]
model = Net().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
scaler = torch.amp.GradScaler("cuda", enabled=own)
inputs, losses = torch.randn(32, 8).to(device), torch.linspace(2.0, 1.0, STEPS).to(device)
waits = []
for number in range(STEPS):
    before = calls.null_gpu_waits()
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16, enabled=own):
        loss = Loss.apply(model(inputs), losses[number])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    waits.append(calls.null_gpu_waits() - before)
parent = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
Path(sys.argv[1]).write_text(json.dumps({"before_line_1": before_line_1, "waits": waits, "parent": parent}))
