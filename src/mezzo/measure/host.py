"""Sample the training thread from outside, ten times a second: its CPU time, the time it waited for a core, and its line.

Linux counts for each thread how long it ran and how long it was ready to run while others had the cores
(``/proc/self/task/*/schedstat``). The rest of the time it slept: on a lock, in ``time.sleep``, on a disk or a socket. So a machine
that other processes keep busy is not mistaken for a script that waits. On other systems only the CPU time of the whole process
is known, to which other threads may contribute: the sleeping time is then a lower bound.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import sysconfig
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from mezzo.records import GpuUse

_LIBRARIES = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_FOLDERS = (str(Path(__file__).parents[2]), *_LIBRARIES, *(str(Path(path).resolve()) for path in _LIBRARIES))
_NOT_THE_SCRIPTS = ("<", *(folder + os.sep for folder in _FOLDERS))
_PACKAGES = "-packages"
"""In the paths of installed packages: ``site-packages``, ``dist-packages``."""
_ASLEEP = 0.5
"""The share of the time since the last sample below which a thread counts as asleep at its line."""
_FEWEST = 3
"""The fewest samples for shares."""


class HostSample(NamedTuple):
    """One sample of the training thread."""

    at_s: float
    """By ``time.perf_counter``."""
    ran_s: float
    """CPU time of the thread."""
    preempted_s: float
    """Time in which the thread was ready to run and other threads had the cores."""


class HostShares(NamedTuple):
    """Shares of a time."""

    slept: float
    preempted: float


class HostSamples:
    """Samples of the thread that created it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._file = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        self.samples: list[HostSample] = []
        self.sleeping: Counter[str] = Counter()
        """How often the thread was seen at each line of the script while it had slept since the sample before."""

    def take(self) -> None:
        """Take one sample; the cost is one small file read and a walk up the thread's stack."""
        sample = HostSample(time.perf_counter(), *self._times_s())
        if self.samples:
            before = self.samples[-1]
            ready_s = sample.ran_s - before.ran_s + sample.preempted_s - before.preempted_s
            busy = ready_s / max(sample.at_s - before.at_s, 1e-9)
            line = line_of(sys._current_frames().get(self._thread)) if busy < _ASLEEP else ""
            if line:
                self.sleeping[line] += 1
        self.samples.append(sample)

    def shares(self, begin_s: float, end_s: float) -> HostShares | None:
        """Return what the thread did between two times; None if too little was sampled."""
        inside = [sample for sample in self.samples if begin_s <= sample.at_s <= end_s]
        if len(inside) < _FEWEST:
            return None
        first, last = inside[0], inside[-1]
        wall_s = last.at_s - first.at_s
        ran, preempted = (last.ran_s - first.ran_s) / wall_s, (last.preempted_s - first.preempted_s) / wall_s
        return HostShares(slept=min(max(1.0 - ran - preempted, 0.0), 1.0), preempted=min(max(preempted, 0.0), 1.0))

    def _times_s(self) -> tuple[float, float]:
        try:
            with open(self._file, encoding="ascii") as file:
                ran_ns, preempted_ns, _ = file.read().split()
            return int(ran_ns) * 1e-9, int(preempted_ns) * 1e-9
        except (OSError, ValueError):
            return time.process_time(), 0.0


def line_of(frame: FrameType | None) -> str:
    """Return the innermost line of the script's own code as ``train.py:15``; empty if there is none."""
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_NOT_THE_SCRIPTS) and _PACKAGES not in path:
            return f"{Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class Waits:
    """A list of waits of one kind in one thread. A wait inside a wait counts once."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._inside = False
        self._ended_s, self._lasted_s = array("d"), array("d")
        self.total_s = 0.0
        """Of all waits so far."""

    def __len__(self) -> int:
        return len(self._ended_s)

    def timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``original``, timed, even if it raises as the last call of an iterator does."""
        clock, thread_of = time.perf_counter, threading.get_ident

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside or thread_of() != self._thread:
                return original(*args, **kwargs)
            self._inside, began_s = True, clock()
            try:
                return original(*args, **kwargs)
            finally:
                ended_s = clock()
                self._inside = False
                self._ended_s.append(ended_s)
                self._lasted_s.append(ended_s - began_s)
                self.total_s += ended_s - began_s

        return call

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def between(self, begin_s: float, end_s: float) -> float:
        """Return the seconds waited between two times of ``time.perf_counter``."""
        pairs = zip(self._ended_s, self._lasted_s, strict=True)
        return sum(max(min(end, end_s) - max(end - lasted, begin_s), 0.0) for end, lasted in pairs)


# A counter that a GPU does not support is None; a missing library is reported.

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
