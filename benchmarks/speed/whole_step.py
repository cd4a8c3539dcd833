"""Is a whole FP16 step with mezzo.AdamW cheaper than the hand-written autocast and GradScaler loop?

The model is so small that a step consists mostly of calls: the benchmark measures the work around the arithmetic. Arithmetic is native on
both sides; on a processor without FP16 units it is equally slow on both.
"""

from __future__ import annotations

import torch

import mezzo
from benchmarks.shared.harness import interleave, median_ms, ratio, report, spread
from benchmarks.shared.loops import Loop, by_hand, calls_a_step, with_session

POLICIES = ("fp16:arithmetic=native:op_lists=device", "fp16-master:arithmetic=native")
ROUNDS, CLIP = 15, 1.0
TARGET = "0.8 or less"


def main() -> None:
    pieces = {name: _loop(name) for name in ("hand", *POLICIES)}
    calls = {name: calls_a_step(run) for name, run in pieces.items()}
    times = interleave(pieces, rounds=ROUNDS)
    rows = []
    for policy in POLICIES:
        rows.append((f"{policy}: Python calls a step", f"{calls[policy] / calls['hand']:.3f}x", TARGET))
        rows.append((f"{policy}: thread CPU time", spread(ratio(times, policy, "hand")), TARGET))
    report("whole_step", rows, {"calls_a_step": calls, "median_ms_of_30_steps": median_ms(times)})


def _loop(name: str) -> Loop:
    return by_hand(torch.float16, CLIP) if name == "hand" else with_session(name, mezzo.AdamW, CLIP)
