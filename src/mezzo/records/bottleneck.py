"""What holds a run back, and the measurements that say so."""

from __future__ import annotations

from typing import Literal

from mezzo.records.values import Reason, Value

Limit = Literal["input", "waiting", "communication", "host", "power", "bandwidth", "arithmetic", "unknown"]
"""What limits a run: loading batches, a lock or sleep, other processes, Python and tiny kernels, a power limit, memory bandwidth, or
matrix products."""


class GpuUse(Value):
    """A GPU's counters, as the driver's library (NVML) reported them each second. None: the GPU does not report it."""

    name: str
    num_samples: int
    utilization: float | None = None
    """Mean share of the time in which any kernel ran."""
    memory_share: float | None = None
    """Largest share of the memory in use, by all processes."""
    power_w: float | None = None
    """Mean power."""
    power_limit_w: float | None = None
    temperature_c: float | None = None
    """The highest temperature."""
    clock_mhz: float | None = None
    """Mean clock of the multiprocessors."""
    clock_limit_mhz: float | None = None
    throttled: dict[str, float] = {}
    """Share of the samples in which the clock was throttled, by reason: ``power limit``, ``heat``, ``power brake``."""


class Bottleneck(Value):
    """What held a run back, from its steps after the first tenth."""

    limit: Limit
    sentence: str
    """Why that is what limits it, with the share that decides."""
    change: list[str] = []
    """What to change, the most promising first."""
    shares: dict[str, float] = {}
    """Share of the time by ``input``, ``communication``, ``waiting``, ``host``, ``bandwidth`` and ``arithmetic``, as far as measured.

    ``preempted`` is the share of the whole time that other processes took; the others are shares of the rest.
    """
    line: str = ""
    """The line of the script that was most often executing while its thread slept, if waiting holds the run back."""
    operations: int | None = None
    """Operations of one step; None where they were not counted."""
    operation_us: float | None = None
    """Their mean time on the host."""
    gpu: GpuUse | None = None
    not_measured: list[Reason] = []
    """What could not be measured, and why."""
