"""How often does Mezzo agree with torch.amp to the bit, in loss scales and in weights after training?"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

import mezzo
from benchmarks.shared.harness import report
from benchmarks.shared.loops import repeated, step_by_hand, step_of_a_session
from benchmarks.shared.models import LossOf, digits_cnn, mlp

TRAJECTORIES, UPDATES, STEPS, LR = 10_000, 16, 50, 1e-3


def same_trajectory(draw: random.Random) -> bool:
    """Whether a dynamic scale and GradScaler, both with settings drawn at random, agree after each of 16 random overflows."""
    init_scale = draw.choice([1.0, 65536.0, 2.0**24, 3e-5, 1234.5, 7e9])
    chosen: dict[str, Any] = {
        "growth_factor": draw.choice([1.001, 1.5, 2.0, 3.7, 4.0]),
        "backoff_factor": draw.choice([0.25, 1 / 3, 0.5, 0.75, 0.9]),
        "growth_interval": draw.choice([1, 2, 3, 5, 8]),
    }
    ours = mezzo.DynamicScale(init_scale, **chosen, min_scale=2.0**-149, max_scale=math.inf)
    theirs = torch.amp.GradScaler("cpu", init_scale=init_scale, **chosen)
    theirs.scale(torch.ones(()))  # GradScaler creates its tensors on first use
    often = draw.random()
    for _ in range(UPDATES):
        found = torch.tensor(float(draw.random() < often))
        theirs._per_optimizer_states[0]["found_inf_per_device"] = {found.device: found}
        theirs.update()
        ours.update(found)
        if ours.value() != theirs.get_scale():
            return False
    return True


Build = Callable[[], tuple[nn.Module, LossOf]]


def weights_by_hand(build: Build, dtype: torch.dtype, clip: float | None) -> list[Tensor]:
    """Return weights and buffers after 50 steps of the hand-written loop."""
    model, loss_of = build()
    repeated(step_by_hand(model, loss_of, dtype, clip, lr=LR), STEPS)()
    return list(model.state_dict().values())


def weights_of_a_session(build: Build, policy: str, clip: float | None) -> list[Tensor]:
    """Return the same for a session with torch's optimizer and torch's op lists for the device."""
    model, loss_of = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    session = mezzo.Session(model, optimizer, policy=f"{policy}:op_lists=device:arithmetic=native", clip_norm=clip)
    repeated(step_of_a_session(model, loss_of, session), STEPS)()
    return list(model.state_dict().values())


def main() -> None:
    draw = random.Random(20261121)
    same = sum(same_trajectory(draw) for _ in range(TRAJECTORIES))
    what = f"loss scales equal to torch.amp.GradScaler's after each of {UPDATES} updates, random settings and overflows"
    rows = [(what, f"{same:,} of {TRAJECTORIES:,}", "all")]
    formats = (("fp16", torch.float16), ("bf16", torch.bfloat16))
    for (name, build), (policy, dtype), clip in product(
        (("MLP", mlp), ("digits CNN", digits_cnn)), formats, (None, 0.1)
    ):
        theirs, ours = weights_by_hand(build, dtype, clip), weights_of_a_session(build, policy, clip)
        equal = sum(bool(torch.equal(a, b)) for a, b in zip(ours, theirs, strict=True))
        what = f"{name}, {policy}{', clipping' if clip else ''}: tensors bit-identical after {STEPS} steps of the hand-written loop"
        rows.append((what, f"{equal} of {len(theirs)}", "all"))
    report("agreement", rows, {})
