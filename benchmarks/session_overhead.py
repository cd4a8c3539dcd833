"""What a Session's step costs beside the hand-written autocast and GradScaler loop: Python calls and CPU time."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.harness import interleave, median_ms, ratio, report, spread
from benchmarks.models import mlp
from mezzo import Session

STEPS = 30
ROUNDS = 15


def main() -> None:
    """Measure with and without clipping, FP16 and BF16, the same torch optimizer on both sides."""
    rows, data = [], {}
    for policy, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        for clip in (None, 1.0):
            hand, session = _hand(dtype, clip), _session(f"{policy}:op_lists=device", clip)
            calls = _calls(session) / _calls(hand)
            times = interleave({"session": session, "hand": hand}, rounds=ROUNDS)
            what = f"{policy}{', clipping' if clip else ''}"
            # Without a scaler and without clipping the hand-written loop takes no norm; a session always does (session.grad_norm).
            target = "1.05 or less" if policy == "fp16" or clip else "(takes the gradient norm)"
            rows.append((f"{what}: Python calls a step against the hand-written loop", f"{calls:.3f}x", target))
            rows.append((f"{what}: thread CPU time", spread(ratio(times, "session", "hand")), ""))
            data[what] = {"calls_ratio": calls, "median_ms_of_30_steps": median_ms(times)}
    report("session_overhead", rows, data)


def _repeat(step: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(STEPS):
            step()

    return run


def _hand(dtype: torch.dtype, clip: float | None) -> Callable[[], None]:
    model, loss_of = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)

    def step() -> None:
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_of(model)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return _repeat(step)


def _session(policy: str, clip: float | None) -> Callable[[], None]:
    model, loss_of = mlp()
    session = Session(model, torch.optim.AdamW(model.parameters(), lr=1e-4), policy=policy, clip_norm=clip)

    def step() -> None:
        with session.autocast():
            loss: Tensor = loss_of(model)
        session.step(loss)

    return _repeat(step)


def _calls(run: Callable[[], None]) -> float:
    run()
    profile = cProfile.Profile()
    profile.enable()
    run()
    profile.disable()
    return pstats.Stats(profile).total_calls / STEPS  # type: ignore[attr-defined,no-any-return]


if __name__ == "__main__":
    main()
