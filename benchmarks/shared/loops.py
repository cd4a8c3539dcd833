"""The training loops that are compared: hand-written with torch.amp, and with a session; and the number of calls of each."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import mezzo
from benchmarks.shared.models import LossOf, mlp

STEPS, LR = 30, 1e-4
Loop = Callable[[], None]


def plain_step(model: nn.Module, loss_of: LossOf, optimizer: torch.optim.Optimizer, clip: float | None = None) -> Loop:
    def step() -> None:
        loss_of(model).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def step_by_hand(
    model: nn.Module, loss_of: LossOf, dtype: torch.dtype | None, clip: float | None, *, lr: float = LR
) -> Loop:
    """Return a step of autocast, GradScaler (for FP16) and clipping as torch's documentation writes them; without a dtype plain FP32."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    if dtype is None:
        return plain_step(model, loss_of, optimizer, clip)
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

    return step


def step_of_a_session(model: nn.Module, loss_of: LossOf, session: mezzo.Session) -> Loop:
    def step() -> None:
        with session.autocast():
            loss: Tensor = loss_of(model)
        session.step(loss)

    return step


def by_hand(dtype: torch.dtype, clip: float | None) -> Loop:
    return repeated(step_by_hand(*mlp(), dtype, clip))


def with_session(policy: str, optimizer: Callable[..., Any], clip: float | None) -> Loop:
    """Return 30 steps of a session with an optimizer class, torch's or Mezzo's."""
    model, loss_of = mlp()
    session = mezzo.Session(model, optimizer(model.parameters(), lr=LR), policy=policy, clip_norm=clip)
    return repeated(step_of_a_session(model, loss_of, session))


def repeated(step: Loop, num: int = STEPS) -> Loop:
    def run() -> None:
        for _ in range(num):
            step()

    return run


def calls_of(run: Callable[[], Any]) -> int:
    watch = cProfile.Profile()
    watch.runcall(run)
    return pstats.Stats(watch).total_calls  # type: ignore[attr-defined,no-any-return]


def calls_a_step(run: Loop) -> float:
    """Return the calls of one of 30 steps, after one run to warm up."""
    run()
    return calls_of(run) / STEPS
