"""Time two loops against each other, each in processes of its own, as a script runs: its hooks are set once, and nobody takes them back.

In one process that sets and undoes the hooks between blocks, Python forgets what it had learned of the types that they change, and the
loop with more Python pays most for that: 2% of a small step, which no script pays. The processes are forked from one, so they
have the same imports. They run their blocks in turn. Each pair of processes is one build; how memory happens to lie favours one side
or the other by a percent or two, so there are several, and the interval is that of their medians.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.harness import BUILDS, over_builds

BLOCKS = 24
Loop = Callable[[], AbstractContextManager[Callable[[], Any]]]
"""Returns the context in which its block runs."""


def in_turn(loops: Mapping[str, Loop]) -> list[dict[str, list[float]]]:
    """Return, for each build, the milliseconds of thread CPU time of every loop's blocks."""
    for loop in loops.values():
        with loop():
            pass  # it imports here what each build would import anew
    return [_build(loops) for _ in range(BUILDS)]


def ratio(builds: list[dict[str, list[float]]], of: str, to: str) -> dict[str, Any]:
    """Return the median over builds of the median ratio of two loops, and the interval of the builds' medians."""
    return over_builds([a / b for a, b in zip(build[of], build[to], strict=True)] for build in builds)


def _build(loops: Mapping[str, Loop]) -> dict[str, list[float]]:
    context = multiprocessing.get_context("fork")
    lines = {}
    for name, loop in loops.items():
        lines[name], theirs = context.Pipe()
        context.Process(target=_serve, args=(loop, theirs), daemon=True).start()
    times: dict[str, list[float]] = {name: [] for name in loops}
    for line in lines.values():
        line.recv()  # set up
    for _ in range(BLOCKS):
        for name, line in lines.items():
            line.send(True)
            times[name].append(line.recv())
    for line in lines.values():
        line.send(False)
        line.recv()
    return times


def _serve(loop: Loop, line: Connection) -> None:
    """Run a block whenever ``line`` asks for one; answer with its milliseconds."""
    torch.set_num_threads(1)
    with loop() as block:
        line.send(None)
        while line.recv():
            began_s = time.thread_time()
            block()
            line.send((time.thread_time() - began_s) * 1e3)
    line.send(None)
