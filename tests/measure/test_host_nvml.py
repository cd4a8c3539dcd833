"""NVML's counters, against a simulated library and a recorded sequence."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from helpers_values import existing
from mezzo.measure.host import GpuCounters, GpuSample, gpu_use, open_counters


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
