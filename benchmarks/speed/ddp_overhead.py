"""What does a session's step cost beside a hand-written loop under DistributedDataParallel, in CPU time, calls and collectives?

Two gloo processes run both loops alternately, block by block, so that both see the same load. The CPU time counts the threads that
train: forward and backward pass, hooks and update run in a process's first thread. The time of gloo's threads depends on how
long processes wait for each other, and is shown separately. Each pair of blocks yields one ratio, of the sums over both processes. Both
loops are rebuilt several times, because their placement in memory favours one or the other; the interval is between the builds'
medians. The hand-written loop against itself shows the smallest difference that can be resolved.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mezzo
from benchmarks.shared.harness import BUILDS, over_builds, report
from benchmarks.shared.loops import LR, STEPS, Loop, calls_a_step, repeated, step_by_hand, step_of_a_session
from benchmarks.shared.models import mlp
from benchmarks.shared.processes import Served, answered

PAIRS, WORLD, LIMIT_S = 12, 2, 3600.0
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": None}


class Setting(NamedTuple):
    """Two loops that are compared."""

    policy: str
    clip: float | None = None
    second: str = "session"
    """The loop that is compared with the hand-written one: a session, or a second hand-written loop."""


SETTINGS = {
    f"{policy}{', clipping' if clip else ''}": Setting(policy, clip) for policy in DTYPES for clip in (None, 1.0)
}
SETTINGS["fp16, by hand against itself"] = Setting("fp16", second="hand")


def main() -> None:
    torch.set_num_threads(1)  # as in the processes that measure
    with tempfile.TemporaryDirectory() as folder:
        started = [Served("spawn", answered, partial(_rank, Path(folder, "rendezvous"), rank)) for rank in range(WORLD)]
        try:
            found = [process.answer(LIMIT_S) for process in started]
        finally:
            for process in started:
                process.close()
    rows, data = [], {}
    for what, setting in SETTINGS.items():
        one = joined([of_rank[what] for of_rank in found])
        rows += _rows(what, setting, one)
        data[what] = one
    report("ddp_overhead", rows, data)


def joined(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the comparison over all processes: the ratio of a pair divides the sums over the processes."""
    builds = []
    for build in range(len(ranks[0]["training_ms"])):
        pairs = zip(*(rank["training_ms"][build] for rank in ranks), strict=True)
        builds.append([sum(second for _, second in pair) / sum(hand for hand, _ in pair) for pair in pairs])
    return {
        **over_builds(builds),
        "step_ms": [_median_ms(ranks, "training_ms", side) for side in (0, 1)],
        "other_threads_step_ms": [_median_ms(ranks, "other_ms", side) for side in (0, 1)],
        "calls": ranks[0]["calls"],
        "collectives": ranks[0]["collectives"],
    }


def _median_ms(ranks: list[dict[str, Any]], what: str, side: int) -> float:
    return round(statistics.median(pair[side] for rank in ranks for build in rank[what] for pair in build) / STEPS, 4)


def _rows(what: str, setting: Setting, one: dict[str, Any]) -> list[tuple[str, str, str]]:
    low, high = one["interval"]
    text = f"{one['ratio']:.3f}x ({low:.3f} to {high:.3f})"
    if setting.second == "hand":
        return [(f"{what}: CPU time of the training threads", text, "the interval holds 1")]
    target = "1.0 or less" if setting.policy == "fp16" or setting.clip else "(takes the gradient norm)"
    rows = [(f"{what}: CPU time of the training threads", text, target)]
    for label, name in (("other threads, ms a step", "other_threads_step_ms"), ("Python calls a step", "calls")):
        rows.append((f"{what}: {label}", f"{one[name][1]:g} and {one[name][0]:g} by hand", ""))
    collectives = "{1:g} and {0:g} by hand".format(*one["collectives"])
    return [*rows, (f"{what}: collectives a step", collectives, "the same")]


def _loops(setting: Setting, *, session_first: bool) -> list[Loop]:
    """Return 30 steps of the hand-written loop, and 30 of the loop compared with it."""

    def by_hand() -> Loop:
        model, loss_of = mlp()
        wrapped = DistributedDataParallel(model)
        return repeated(step_by_hand(wrapped, loss_of, DTYPES[setting.policy], setting.clip, lr=LR))

    def with_session() -> Loop:
        bare, loss_of = mlp()
        model = DistributedDataParallel(bare)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        policy = setting.policy if setting.policy == "fp32" else f"{setting.policy}:op_lists=device"
        session = mezzo.Session(model, optimizer, policy=policy, clip_norm=setting.clip)
        return repeated(step_of_a_session(model, loss_of, session))

    order = -1 if session_first else 1
    return [build() for build in (by_hand, by_hand if setting.second == "hand" else with_session)[::order]][::order]


def _measured(setting: Setting) -> dict[str, Any]:
    found: dict[str, Any] = {"training_ms": [], "other_ms": []}
    for build in range(BUILDS):
        loops = _loops(setting, session_first=bool(build % 2))
        if build == 0:
            found["calls"] = [round(calls_a_step(run)) for run in loops]
            found["collectives"] = [collectives_a_step(run) for run in loops]
        for run in loops:
            run()
        pairs = [_pair(loops, second_first=bool(number % 2)) for number in range(PAIRS)]
        found["training_ms"].append([training for training, _ in pairs])
        found["other_ms"].append([other for _, other in pairs])
    return found


def _pair(loops: list[Loop], *, second_first: bool) -> tuple[list[float], list[float]]:
    """Return the milliseconds that a block of each loop took: of the training thread, and of this process's other threads."""
    training, other = [0.0, 0.0], [0.0, 0.0]
    for side in (1, 0) if second_first else (0, 1):
        dist.barrier()
        thread, process = time.thread_time(), time.process_time()
        loops[side]()
        training[side] = (time.thread_time() - thread) * 1e3
        other[side] = max((time.process_time() - process) * 1e3 - training[side], 0.0)
    return training, other


def collectives_a_step(run: Loop) -> float:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return sum(event.name.startswith("gloo:") for event in profile.events() or ()) / STEPS


def _rank(rendezvous: Path, rank: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    found = {what: _measured(setting) for what, setting in SETTINGS.items()}
    dist.destroy_process_group()
    return found
