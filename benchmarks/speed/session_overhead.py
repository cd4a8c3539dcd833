"""What does a session's step cost beside the hand-written autocast and GradScaler loop, in Python calls and CPU time?"""

from __future__ import annotations

import torch

from benchmarks.shared.harness import interleave, median_ms, ratio, report, spread
from benchmarks.shared.loops import by_hand, calls_a_step, with_session

ROUNDS = 15


def main() -> None:
    rows, data = [], {}
    for policy, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        for clip in (None, 1.0):
            hand, session = by_hand(dtype, clip), with_session(f"{policy}:op_lists=device", torch.optim.AdamW, clip)
            calls = calls_a_step(session) / calls_a_step(hand)
            times = interleave({"session": session, "hand": hand}, rounds=ROUNDS)
            what = f"{policy}{', clipping' if clip else ''}"
            # Without a scaler and without clipping the hand-written loop computes no norm; a session always does (session.grad_norm).
            target = "1.05 or less" if policy == "fp16" or clip else "(takes the gradient norm)"
            rows.append((f"{what}: Python calls a step against the hand-written loop", f"{calls:.3f}x", target))
            rows.append((f"{what}: thread CPU time", spread(ratio(times, "session", "hand")), ""))
            data[what] = {"calls_ratio": calls, "median_ms_of_30_steps": median_ms(times)}
    report("session_overhead", rows, data)
