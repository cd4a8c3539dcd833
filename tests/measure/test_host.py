"""What the thread did, from samples with known times."""

from __future__ import annotations

import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import pytest

from helpers_values import existing
from mezzo.measure import host as module
from mezzo.measure.host import (
    GpuCounters,
    GpuSample,
    HostSample,
    HostSamples,
    HostShares,
    Waits,
    gpu_use,
    line_of,
    open_counters,
)


def test_shares_from_samples() -> None:
    host = HostSamples()
    host.samples = [HostSample(t, 0.3 * t, 0.2 * t) for t in (0.0, 1.0, 2.0, 3.0)]
    assert host.shares(0.5, 3.5) == pytest.approx(HostShares(slept=0.5, preempted=0.2))
    assert host.shares(1.5, 3.5) is None  # two samples


def test_a_sleeping_thread_is_seen_asleep_at_its_line() -> None:
    host = HostSamples()
    for _ in range(4):
        host.take()
        time.sleep(0.05)
    shares = existing(host.shares(0.0, time.perf_counter()))
    assert shares.slept > 0.5
    assert [line.partition(":")[0] for line in host.sleeping] == ["test_host.py"]


def test_lines_of_libraries_are_passed_over() -> None:
    assert line_of(sys._getframe()).startswith("test_host.py:")
    frames: list[str] = []
    sorted([1], key=lambda _: frames.append(line_of(sys._getframe())))
    assert frames[0].startswith("test_host.py:")
    assert line_of(None) == ""


# --- Times of waits: nested ones once, other threads' not, cut at the window's ends ---


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def test_waits_are_timed_once_and_cut(clock: list[float]) -> None:
    waits = Waits()

    def inner() -> None:
        clock[0] += 1.0

    timed = waits.timed(inner)

    def outer() -> None:
        timed()
        clock[0] += 2.0

    waits.timed(outer)()  # 0 to 3
    clock[0] = 10.0
    timed()  # 10 to 11
    assert (len(waits), waits.total_s) == (2, 4.0)
    assert waits.between(0, 20) == 4.0
    assert waits.between(2, 10.5) == 1.5
    assert waits.between(4, 9) == 0.0


def test_the_end_of_an_iterator_is_timed_and_raised(clock: list[float]) -> None:
    waits = Waits()
    with pytest.raises(StopIteration):
        waits.timed(iter([]).__next__)()
    assert len(waits) == 1


def test_another_thread_and_a_pause_count_nothing(clock: list[float]) -> None:
    waits = Waits()
    timed = waits.timed(lambda: None)
    thread = threading.Thread(target=timed)
    thread.start()
    thread.join()
    with waits.paused():
        timed()
    assert len(waits) == 0


# --- NVML's counters, against a simulated library and a recorded sequence ---


class NVMLError(Exception):
    pass


class SimulatedNvml(types.SimpleNamespace):
    """A GPU that answers as NVML does; what it does not support raises."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    def __init__(self, unsupported: tuple[str, ...] = ()) -> None:
        self.unsupported = unsupported
        self.asked: list[Any] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlDeviceGetName": b"NVIDIA H100",
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetUtilizationRates": types.SimpleNamespace(gpu=40),
            "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(used=20, total=80),
            "nvmlDeviceGetPowerUsage": 350_000,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetClockInfo": 1755,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x04,
            "nvmlDeviceGetHandleByUUID": "handle",
            "nvmlDeviceGetHandleByIndex": "handle",
        }
        if name not in answers:
            raise AttributeError(name)

        def answer(*args: Any) -> Any:
            self.asked.append((name, *args))
            if name in self.unsupported:
                raise NVMLError("Not Supported")
            return answers[name]

        return answer


def test_a_simulated_gpu_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimulatedNvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    counters = open_counters("1234", 0)
    assert isinstance(counters, GpuCounters)
    counters.take()
    assert ("nvmlDeviceGetHandleByUUID", "GPU-1234") in library.asked
    assert counters.samples == [GpuSample(0.4, 0.25, 350.0, 61, 1755, 4)]
    found = existing(counters.use())
    assert (found.name, found.power_limit_w, found.clock_limit_mhz) == ("NVIDIA H100", 700.0, 1980)
    assert found.throttled == {"power limit": 1.0}


def test_a_counter_that_a_gpu_lacks_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetCurrentClocksThrottleReasons")
    monkeypatch.setitem(sys.modules, "pynvml", SimulatedNvml(lacking))
    counters = open_counters(None, 3)
    assert isinstance(counters, GpuCounters)
    counters.take()
    assert counters.samples == [GpuSample(None, 0.25, None, 61, 1755, None)]
    found = existing(counters.use())
    assert (found.utilization, found.power_w, found.throttled) == (None, None, {})


def test_no_library_and_no_driver_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_counters(None, 0) == "nvidia-ml-py is not installed; type: pip install nvidia-ml-py"
    monkeypatch.setitem(sys.modules, "pynvml", SimulatedNvml(("nvmlInit",)))
    assert open_counters(None, 0) == "NVML failed: Not Supported"


RECORDED = [
    GpuSample(0.98, 0.70, 690.0, 70, 1700, 0x04),
    GpuSample(0.99, 0.71, 700.0, 74, 1650, 0x04 | 0x40),
    GpuSample(0.97, 0.70, 650.0, 73, 1800, 0x00),
    GpuSample(None, None, None, None, None, 0x01),  # idle is no reason of a busy GPU
]


def test_a_recorded_sequence_is_summed_up() -> None:
    found = existing(gpu_use(RECORDED, "GPU", limit_w=700.0, clock_limit_mhz=1980))
    assert found.utilization == pytest.approx(0.98)
    assert found.power_w == pytest.approx(680.0)
    assert found.clock_mhz == pytest.approx(5150 / 3)
    assert (found.memory_share, found.temperature_c, found.num_samples) == (0.71, 74, 4)
    assert found.throttled == {"power limit": 0.5, "heat": 0.25}
    assert gpu_use([], "GPU", limit_w=None, clock_limit_mhz=None) is None
