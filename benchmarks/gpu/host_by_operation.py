"""How long does the host need to call each operation?

Plain torch; Mezzo is not needed. The tensors are so small that the device is never what is waited for, and 200 calls fit into its queue: a
block of calls is timed without waiting for them, and the device finishes between blocks. ``plain`` calls the operation alone, ``graph``
with a gradient to be computed, ``both`` with its backward pass, ``autocast`` that in a region of BF16. A row is the median of seven blocks
with the smallest and the largest, in microseconds a call, written at once; rows that the file contains already are skipped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.measure_zoo import wait
from benchmarks.shared import csv_rows, options
from benchmarks.shared.harness import summary

NAMES = ("operation", "form", "us", "us_min", "us_max", "device", "torch")
BLOCKS, WARM_UP = 7, 3
Call = Callable[[], Any]
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda x: x + x,
    "mul": lambda x: x * 0.5,
    "relu": F.relu,
    "gelu": F.gelu,
    "sum": lambda x: x.sum(),
    "to bf16": lambda x: x.to(torch.bfloat16),
    "contiguous": lambda x: x.t().contiguous(),
    "view": lambda x: x.view(-1),
    "cat": lambda x: torch.cat([x, x]),
    "mm": lambda x: x @ x,
    "linear": lambda x: F.linear(x, x, x[0]),
    "bmm": lambda x: x.view(2, 8, 16) @ x.view(2, 16, 8),
    "softmax": lambda x: F.softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (16,), x[0], x[1]),
    "batch_norm": lambda x: F.batch_norm(x, None, None, x[0], x[1], training=True),
    "conv2d": lambda x: F.conv2d(x.view(1, 1, 16, 16), x.view(1, 1, 16, 16)[..., :3, :3]),
    "attention": lambda x: F.scaled_dot_product_attention(*([x.view(1, 2, 8, 16)] * 3)),
    "embedding": lambda x: F.embedding(torch.zeros(4, dtype=torch.long, device=x.device), x),
    "dropout": lambda x: F.dropout(x, 0.1),
}
"""Operations of a matrix of 16 x 16."""


def calls(device: str) -> Iterator[tuple[str, str, Call]]:
    """Yield each operation in each form, and one update of 10 weights by AdamW in each of torch's ways."""
    plain = torch.randn(16, 16, device=device)
    leaf = plain.clone().requires_grad_()
    for name, run in OPERATIONS.items():

        def both(run: Callable[[Tensor], Tensor] = run) -> None:
            made = run(leaf)
            made.backward(torch.ones_like(made))

        def autocast(both: Call = both) -> None:
            with torch.autocast(device, torch.bfloat16):
                both()

        yield name, "plain", lambda run=run: run(plain)  # type: ignore[misc]
        yield name, "graph", lambda run=run: run(leaf)  # type: ignore[misc]
        yield name, "both", both
        yield name, "autocast", autocast
    for way in ("foreach", "fused"):
        weights = [torch.randn(16, 16, device=device, requires_grad=True) for _ in range(10)]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        yield f"AdamW of 10, {way}", "plain", torch.optim.AdamW(weights, **{way: True}).step  # type: ignore[arg-type]


def times_us(call: Call, device: str, num: int) -> list[float]:
    """Return the microseconds of a call on the host, block by block."""
    found = []
    for block in range(WARM_UP + BLOCKS):
        wait(device)
        began_s = time.perf_counter()
        for _ in range(num):
            call()
        if block >= WARM_UP:
            found.append(1e6 * (time.perf_counter() - began_s) / num)
    wait(device)
    return found


def main(argv: Sequence[str] = ()) -> None:
    parser = options(__name__)
    parser.add_argument("--out", type=Path, default=Path("operations.csv"), help="rows are added to this file")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--calls", type=int, default=200, help="calls of a block")
    chosen = parser.parse_args(argv)
    torch.set_num_threads(1)
    done = {(cells["operation"], cells["form"]) for cells in csv_rows.continued(chosen.out)}
    where = torch.cuda.get_device_name() if chosen.device == "cuda" else "cpu"
    for name, form, call in calls(chosen.device):
        if (name, form) in done:
            continue
        us = summary(times_us(call, chosen.device, chosen.calls))
        cells = (name, form, *(round(one, 3) for one in us.values()), where, torch.__version__)
        csv_rows.append(chosen.out, [dict(zip(NAMES, cells, strict=True))], NAMES)
        print(f"{name}, {form}: {us['median']:.1f} us", flush=True)
