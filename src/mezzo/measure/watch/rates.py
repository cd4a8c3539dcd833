"""Measure the rates of this machine's CPU for products and for memory traffic, in about 50 ms."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_SIDE = 384
_COPIED = 8 << 20
"""Numbers in the copied tensor: 32 MiB, beyond most caches."""
_REPEATS = 4


class DeviceRates(NamedTuple):
    """Rates of a device."""

    flops_per_s: float
    bytes_per_s: float


@functools.cache
def cpu_rates(threads: int) -> DeviceRates:
    """Return the rates of FP32 products and of copies with this many threads; measured once per process."""
    cpu: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    with torch.no_grad():
        square, product = torch.ones(_SIDE, _SIDE, **cpu), torch.empty(_SIDE, _SIDE, **cpu)
        source, copied = torch.ones(_COPIED, **cpu), torch.empty(_COPIED, **cpu)
        multiply_s = _fastest_s(lambda: torch.mm(square, square, out=product))
        copy_s = _fastest_s(lambda: copied.copy_(source))
    return DeviceRates(2 * _SIDE**3 / multiply_s, 2 * copied.nbytes / copy_s)


def _fastest_s(action: Callable[[], Any]) -> float:
    action()
    times = []
    for _ in range(_REPEATS):
        began_s = time.thread_time()
        action()
        times.append(time.thread_time() - began_s)
    return max(min(times), 1e-9)
