"""What a Session's step costs under DistributedDataParallel beside the hand-written DDP + GradScaler loop: calls, collectives, CPU time.

Two gloo processes train the same models in turns, round by round; the CPU time is that of the whole process, so that the threads of
autograd and gloo count. Both processes measure, and the larger ratio of the two medians is quoted.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mezzo
from benchmarks.harness import ratio, report, spread
from benchmarks.loops import STEPS, Loop, calls_a_step, repeated, step_by_hand, step_of_a_session
from benchmarks.models import mlp

ROUNDS, WORLD = 15, 2
SETTINGS = {
    f"{policy}{', clipping' if clip else ''}": (policy, dtype, clip)
    for policy, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16))
    for clip in (None, 1.0)
}


def main() -> None:
    """Measure with and without clipping, FP16 and BF16, the same torch optimizer on both sides."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.ddp_overhead", folder]
        started = [subprocess.Popen([*command, str(rank)]) for rank in range(WORLD)]
        codes = [process.wait() for process in started]
        if any(codes):
            raise SystemExit("a process failed")
        found = [json.loads((Path(folder) / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(WORLD)]
    rows, data = [], {}
    for what in SETTINGS:
        worst = max((one[what] for one in found), key=lambda one: float(one["cpu"]["median"]))
        calls, collectives = worst["calls"], worst["collectives"]
        target = "1.0 or less" if what.startswith("fp16") or "clipping" in what else "(takes the gradient norm)"
        rows.append((f"{what}: process CPU time", spread(worst["cpu"]), target))
        text = f"{calls['session']:.0f} and {calls['hand']:.0f} ({calls['session'] / calls['hand']:.3f}x)"
        rows.append(
            (f"{what}: Python calls a step, session and by hand", text, "1.0 or less" if "1.0" in target else "")
        )
        text = f"{collectives['session']:g} and {collectives['hand']:g}"
        rows.append((f"{what}: collectives a step, session and by hand", text, "the same"))
        data[what] = worst
    report("ddp_overhead", rows, data)


def _loops(policy: str, dtype: torch.dtype, clip: float | None) -> dict[str, Loop]:
    """Return 30 steps by hand, and with a session."""
    (first, loss_of), (second, _) = mlp(), mlp()
    model = DistributedDataParallel(first)
    wrapped = DistributedDataParallel(second)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4)
    session = mezzo.Session(wrapped, optimizer, policy=f"{policy}:op_lists=device", clip_norm=clip)
    return {
        "hand": repeated(step_by_hand(model, loss_of, dtype, clip)),
        "session": repeated(step_of_a_session(wrapped, loss_of, session)),
    }


def _measured(loops: dict[str, Loop]) -> dict[str, Any]:
    calls = {name: calls_a_step(run) for name, run in loops.items()}
    collectives = {name: collectives_a_step(run) for name, run in loops.items()}
    times: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(ROUNDS):
        for name in sorted(loops, reverse=bool(number % 2)):
            dist.barrier()
            began = time.process_time()
            loops[name]()
            times[name].append(time.process_time() - began)
    return {"calls": calls, "collectives": collectives, "cpu": ratio(times, "session", "hand")}


def collectives_a_step(run: Callable[[], None]) -> float:
    """Return the collectives that gloo runs in one step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return sum(event.name.startswith("gloo:") for event in profile.events() or ()) / STEPS


def _rank(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=WORLD)
    found = {what: _measured(_loops(*setting)) for what, setting in SETTINGS.items()}
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(Path(sys.argv[1]), int(sys.argv[2]))
