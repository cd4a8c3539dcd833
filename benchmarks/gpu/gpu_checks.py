"""Do all kernels run, and do eager steps never wait for the device, before anything is timed on a GPU?

``kernels`` runs every kernel of the optimizers on odd sizes, to be run under compute-sanitizer. ``waits`` trains eagerly under every
policy while torch raises an error at any wait for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import mezzo
from benchmarks.gpu.contest.cases import BUILT_IN, POLICIES
from benchmarks.gpu.contest.workloads import workload
from benchmarks.shared import options
from mezzo.engine.optimizers.one_pass import choose
from mezzo.errors import UnsupportedFormatError

SIZES = (1, 7, 1023, 1024, 65_537)
WEIGHTS = (torch.float32, torch.float16, torch.bfloat16)
MOMENTS: tuple[dict[str, Any], ...] = ({}, {"moments": "bf16"}, {"moments": "8bit"})


def kernels(device: str) -> int:
    """Update weights of every format with every format of moments; return the number of updates."""
    done = 0
    print(choose(device)[1])
    for dtype in WEIGHTS:
        for settings in (*MOMENTS, None):
            weights = [nn.Parameter(torch.randn(n, device=device).to(dtype)) for n in SIZES]
            optimizer: Any = mezzo.SGD(weights, lr=0.1, momentum=0.9)
            if settings is not None:
                optimizer = mezzo.AdamW(weights, lr=1e-3, **settings)
            for _ in range(2):
                for weight in weights:
                    weight.grad = torch.randn_like(weight)
                optimizer.step()
                done += 1
    return done


def waits(device: str) -> int:
    """Train small models under every policy; return how many policies waited for the device, or failed."""
    wrong = 0
    for name, batch in BUILT_IN.items():
        work = workload(name, tiny=True)
        for policy in POLICIES:
            try:
                _train(work.model(device), work, work.batches(batch, device, 1)[0], policy, device)
                print(f"{name} {policy}: no wait")
            except (UnsupportedFormatError, ImportError) as error:
                print(f"{name} {policy}: not available: {error}")
            except Exception as error:
                wrong += 1
                print(f"{name} {policy}: {type(error).__name__}: {error}")
    return wrong


def _train(model: nn.Module, work: Any, batch: Any, policy: str, device: str) -> None:
    session = mezzo.Session(model, mezzo.AdamW(model.parameters(), lr=1e-4), policy=policy, clip_norm=1.0)

    def step() -> None:
        with session.autocast():
            loss = work.loss(model, *batch)
        session.step(loss)

    for _ in range(3):  # kernels are compiled and algorithms chosen here
        step()
    with _refusing_waits(device):
        for _ in range(3):
            step()


@contextmanager
def _refusing_waits(device: str) -> Iterator[None]:
    if device != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def main(argv: Sequence[str] = ()) -> int:
    parser = options(__name__)
    parser.add_argument("what", choices=("kernels", "waits"))
    parser.add_argument("device", nargs="?", default="cuda", help="cpu tests this program")
    chosen = parser.parse_args(argv)
    if chosen.what == "kernels":
        print(kernels(chosen.device), "updates")
        return 0
    return min(waits(chosen.device), 1)
