"""Read a GPU's counters by NVML, the library behind ``nvidia-smi`` (package ``nvidia-ml-py``, imported only if a GPU is used).

A counter that a GPU does not support is None; a missing library is reported.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mezzo.records import GpuUse

THROTTLE_REASONS = {
    0x04: "power limit",
    0x08: "heat or power brake",
    0x20: "heat",
    0x40: "heat",
    0x80: "power brake",
}
"""Bits of NVML's clock event reasons that slow a busy GPU; the others mean that it is idle or its clock was set."""


class GpuSample(NamedTuple):
    """A GPU's counters at one time."""

    utilization: float | None
    memory_share: float | None
    power_w: float | None
    temperature_c: float | None
    clock_mhz: float | None
    reasons: int | None
    """Bits of NVML's clock event reasons."""


class GpuCounters:
    """The counters of one GPU."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle
        self.samples: list[GpuSample] = []
        name = self._read(lambda: library.nvmlDeviceGetName(handle))
        self._name = name.decode() if isinstance(name, bytes) else str(name or "GPU")
        self._limit_w = _thousandth(self._read(lambda: library.nvmlDeviceGetEnforcedPowerLimit(handle)))
        self._clock_limit_mhz = self._read(lambda: library.nvmlDeviceGetMaxClockInfo(handle, library.NVML_CLOCK_SM))

    def take(self) -> None:
        """Read every counter once."""
        library, handle, read = self._library, self._handle, self._read
        used = read(lambda: library.nvmlDeviceGetUtilizationRates(handle).gpu)
        memory = read(lambda: library.nvmlDeviceGetMemoryInfo(handle))
        # Older versions of the library have the older name only.
        reasons = getattr(library, "nvmlDeviceGetCurrentClocksEventReasons", None)
        reasons = reasons or library.nvmlDeviceGetCurrentClocksThrottleReasons
        self.samples.append(
            GpuSample(
                utilization=None if used is None else used / 100,
                memory_share=None if memory is None else memory.used / memory.total,
                power_w=_thousandth(read(lambda: library.nvmlDeviceGetPowerUsage(handle))),
                temperature_c=read(lambda: library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU)),
                clock_mhz=read(lambda: library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM)),
                reasons=read(lambda: reasons(handle)),
            )
        )

    def use(self) -> GpuUse | None:
        """Return the samples as part of a record; None without any."""
        return gpu_use(self.samples, self._name, limit_w=self._limit_w, clock_limit_mhz=self._clock_limit_mhz)

    def _read(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except self._library.NVMLError:  # not supported by this GPU, or not allowed to this user
            return None


def open_counters(uuid: str | None, index: int) -> GpuCounters | str:
    """Return the counters of a GPU, or why there are none.

    Args:
        uuid: the GPU as torch names it, without ``GPU-``; it is the same whatever CUDA_VISIBLE_DEVICES says. None if unknown.
        index: its number, for a GPU without one.
    """
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        return "nvidia-ml-py is not installed; type: pip install nvidia-ml-py"
    try:
        library.nvmlInit()
        if uuid is None:
            return GpuCounters(library, library.nvmlDeviceGetHandleByIndex(index))
        return GpuCounters(library, library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    except library.NVMLError as error:
        return f"NVML failed: {error}"


def gpu_use(
    samples: Sequence[GpuSample], name: str, *, limit_w: float | None, clock_limit_mhz: float | None
) -> GpuUse | None:
    """Return a GPU's samples as part of a record; None without any."""
    if not samples:
        return None
    throttled = Counter(
        reason
        for sample in samples
        for reason in {word for bit, word in THROTTLE_REASONS.items() if (sample.reasons or 0) & bit}
    )
    return GpuUse(
        name=name,
        num_samples=len(samples),
        utilization=_mean([sample.utilization for sample in samples]),
        memory_share=max((s.memory_share for s in samples if s.memory_share is not None), default=None),
        power_w=_mean([sample.power_w for sample in samples]),
        power_limit_w=limit_w,
        temperature_c=max((s.temperature_c for s in samples if s.temperature_c is not None), default=None),
        clock_mhz=_mean([sample.clock_mhz for sample in samples]),
        clock_limit_mhz=clock_limit_mhz,
        throttled={reason: count / len(samples) for reason, count in sorted(throttled.items())},
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _thousandth(value: float | None) -> float | None:
    return None if value is None else value / 1000
