"""A whole FP16 step of a small model, clipped: mezzo.AdamW in a session against the hand-written autocast and GradScaler loop.

The model is so small that a step is mostly calls: what is measured is the work around the arithmetic. Arithmetic is native on both
sides; on a processor without FP16 units that is slow, and slow alike.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

import mezzo
from benchmarks.harness import interleave, median_ms, ratio, report, spread
from benchmarks.models import mlp

POLICIES = ("fp16:arithmetic=native:op_lists=device", "fp16-master:arithmetic=native")
STEPS, ROUNDS, CLIP = 30, 15, 1.0
TARGET = "0.8 or less"


def main() -> None:
    """Measure both ways of keeping weights: FP32 under autocast, and FP16 with masters."""
    pieces = {"hand": _hand(), **{policy: _session(policy) for policy in POLICIES}}
    calls = {name: _calls(run) for name, run in pieces.items()}
    times = interleave(pieces, rounds=ROUNDS)
    rows = []
    for policy in POLICIES:
        rows.append((f"{policy}: Python calls a step", f"{calls[policy] / calls['hand']:.3f}x", TARGET))
        rows.append((f"{policy}: thread CPU time", spread(ratio(times, policy, "hand")), TARGET))
    report("whole_step", rows, {"calls_a_step": calls, "median_ms_of_30_steps": median_ms(times)})


def profile(name: str) -> None:
    """Print where the calls of one piece go: ``python -m benchmarks.whole_step POLICY``."""
    run = _hand() if name == "hand" else _session(name)
    run()
    watch = cProfile.Profile()
    watch.runcall(run)
    pstats.Stats(watch).sort_stats("ncalls").print_stats(45)


def _repeat(step: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(STEPS):
            step()

    return run


def _hand() -> Callable[[], None]:
    model, loss_of = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu")

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return _repeat(step)


def _session(policy: str) -> Callable[[], None]:
    model, loss_of = mlp()
    session = mezzo.Session(model, mezzo.AdamW(model.parameters(), lr=1e-4), policy=policy, clip_norm=CLIP)

    def step() -> None:
        with session.autocast():
            loss: Tensor = loss_of(model)
        session.step(loss)

    return _repeat(step)


def _calls(run: Callable[[], None]) -> float:
    run()
    watch = cProfile.Profile()
    watch.runcall(run)
    return pstats.Stats(watch).total_calls / STEPS  # type: ignore[attr-defined,no-any-return]


if __name__ == "__main__":
    profile(sys.argv[1]) if sys.argv[1:] else main()
