"""What does ``mezzo watch`` cost for each batch and each sample?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from benchmarks.shared.harness import report
from mezzo.measure.host import HostSamples, Waits

_CALLS, _ROUNDS = 20_000, 9
_SAMPLES_A_SECOND = 10
_STEP_MS = 1.0
"""A short step: watching is a larger share of it than of a long one."""


def cpu_us(action: Callable[[], object], *, calls: int) -> float:
    """Return the CPU time of one call, the median of several rounds."""
    rounds = []
    for _ in range(_ROUNDS):
        began_s = time.thread_time()
        for _ in range(calls):
            action()
        rounds.append(1e6 * (time.thread_time() - began_s) / calls)
    return statistics.median(rounds)


def main() -> None:
    def plain() -> None:
        return None

    batch_us = cpu_us(Waits().timed(plain), calls=_CALLS) - cpu_us(plain, calls=_CALLS)
    sample_us = cpu_us(HostSamples().take, calls=500)
    share = batch_us / (1e3 * _STEP_MS) + sample_us * _SAMPLES_A_SECOND / 1e6
    rows = [
        ("a wrapped call", f"{batch_us:.2f} us", ""),
        (f"a sample, {_SAMPLES_A_SECOND} a second", f"{sample_us:.1f} us", ""),
        (f"share of a step of {_STEP_MS:g} ms", f"{share:.2%}", "at most 1%"),
    ]
    report("watching", rows, {"batch_us": batch_us, "sample_us": sample_us, "share": share})
