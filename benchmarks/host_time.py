"""What `mezzo run` adds to the host's time of a step: an unmodified script under a policy against the same loop without Mezzo.

A small MLP, so that the host's time is most of the step: on a GPU with small kernels that is what the step takes, and what
`mezzo compare` would measure. Native arithmetic and the device's op lists: what is compared computes the same on both sides.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from benchmarks.harness import report
from benchmarks.processes import Loop, in_turn, ratio
from mezzo.launch.guard_request import GuardRequest
from mezzo.launch.torch import switched
from mezzo.launch.torch.guarding import ScriptGuard
from mezzo.policy import Policy

STEPS, UNTIMED_STEPS = 50, 110  # 50 steps contain their share of what a run does every 10, 25 or 32 steps
SIZES = (64, 256, 256, 10)
Step = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One policy's script under Mezzo and the loop that does the same by hand."""

    name: str
    policy: str | None
    """None: as-is."""
    format: torch.dtype | None
    """What the loop by hand gives autocast; None for no autocast. The script under Mezzo has none, unless it runs as it is.

    BF16 where a loss is scaled, too: FP16 products take a CPU ten times as long as the rest of a step, which would hide what is measured.
    """
    scales: bool
    target: float
    own_amp: bool = False
    """Whether the script under Mezzo is the loop by hand itself."""


CASES = (
    Case("as-is", None, None, False, 1.05),
    Case("as-is, the script's own GradScaler", None, torch.bfloat16, True, 1.05, own_amp=True),
    Case("fp32", "fp32", None, False, 1.05),
    Case("bf16", "bf16:op_lists=device", torch.bfloat16, False, 1.03),
    Case("bf16 with the loss scale of fp16", "bf16:op_lists=device:loss_scale=dynamic", torch.bfloat16, True, 1.03),
)


def script(format: torch.dtype | None, *, scales: bool) -> Step:
    """Return a training step of a script: with autocast and a GradScaler of its own if asked."""
    torch.manual_seed(0)
    layers = [m for a, b in pairwise(SIZES) for m in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu") if scales else None
    inputs, labels = torch.randn(64, SIZES[0]), torch.randint(0, SIZES[-1], (64,))

    def step() -> None:
        optimizer.zero_grad()
        with nullcontext() if format is None else torch.autocast("cpu", dtype=format):
            loss = nn.functional.cross_entropy(model(inputs), labels)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return step


def loops(case: Case) -> dict[str, Loop]:
    """Return the two loops of a case, past the step that is inspected and the first 100, in which the loop is checked for misuse."""

    @contextmanager
    def mezzo() -> Iterator[Step]:
        """Run as ``mezzo run`` does, its guard included."""
        with switched(None if case.policy is None else Policy.of(case.policy)) as (run, _):
            run.guard = ScriptGuard(run, GuardRequest(), on_stop=list)
            yield _block(script(case.format if case.own_amp else None, scales=case.own_amp and case.scales))

    @contextmanager
    def hand() -> Iterator[Step]:
        yield _block(script(case.format, scales=case.scales))

    return {"mezzo": mezzo, "hand": hand}


def _block(step: Step) -> Step:
    for _ in range(UNTIMED_STEPS):
        step()

    def block() -> None:
        for _ in range(STEPS):
            step()

    return block


def main() -> None:
    """Measure all cases, each in builds of its own."""
    rows, data = [], {}
    for case in CASES:
        builds = in_turn(loops(case))
        found = ratio(builds, "mezzo", "hand")
        low, high = found["interval"]
        text = f"{found['ratio']:.3f}x ({low:.3f} to {high:.3f})"
        rows.append((f"{case.name}: thread CPU time a step", text, f"{case.target} or less"))
        by_hand_us = statistics.median([ms for build in builds for ms in build["hand"]]) / STEPS * 1e3
        data[case.name] = {**found, "by_hand_us_a_step": round(by_hand_us, 1)}
    report("host_time", rows, data)


if __name__ == "__main__":
    main()
