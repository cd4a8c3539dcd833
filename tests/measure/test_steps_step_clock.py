"""Times of steps by a GPU's events, and the allocator's peaks, on stand-ins for torch.cuda; nothing here has run on a GPU."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from mezzo.launch.torch.counted_step import CountedStep
from mezzo.launch.torch.state import TorchRun
from mezzo.measure.memory import CudaPeaks, Peaks
from mezzo.measure.steps import StepClock, StepRecorder


class Queue:
    """Stand for a GPU that is slower than its host: its time advances when a test says so."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.made = self.waits = 0
        self.streams: list[Any] = []
        self.lags = 0
        """How many of the last events are not over yet."""
        self.recorded: list[Any] = []
        self.capturing = self.fails = False


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    gpu = Queue()

    class Event:
        def __init__(self, *, enable_timing: bool = False) -> None:
            assert enable_timing
            gpu.made += 1
            self.at_ms = -1.0

        def record(self, stream: Any) -> None:
            gpu.streams.append(stream)
            self.at_ms = gpu.now_ms
            gpu.recorded = [event for event in gpu.recorded if event is not self] + [self]

        def query(self) -> bool:
            return self not in gpu.recorded[len(gpu.recorded) - gpu.lags :]

        def synchronize(self) -> None:
            gpu.waits += 1
            gpu.lags = 0

        def elapsed_time(self, other: Any) -> float:
            if gpu.fails:
                raise RuntimeError("CUDA error: device-side assert triggered")
            assert self.query()
            assert other.query()
            return float(other.at_ms - self.at_ms)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.capturing)
    return gpu


def step(clock: StepClock, queue: Queue, took_ms: float, *, optimizers: int = 1) -> None:
    for _ in range(optimizers):
        queue.now_ms += took_ms / optimizers
        clock.mark()
    clock.add(clock.take())


def test_times_are_the_devices_and_nobody_waits_for_them(queue: Queue) -> None:
    before = time.perf_counter()
    clock = StepClock()
    clock.device = torch.device("cuda", 1)
    for number in range(1, 4):
        step(clock, queue, 10.0 * number, optimizers=number)
    assert queue.waits == 0
    times = clock.time_ms()
    on_host_ms = (time.perf_counter() - before) * 1e3
    assert 0 < times[0] < on_host_ms  # before the first event there is the host's clock only
    assert times[0] != 10.0
    assert times[1:] == [20.0, 30.0]
    assert queue.waits == 1
    assert set(queue.streams) == {"stream of cuda:1"}


def test_events_are_read_and_used_again_once_they_are_over(queue: Queue) -> None:
    clock = StepClock()
    clock.device = torch.device("cuda", 0)
    queue.lags = 10
    for _ in range(500):
        step(clock, queue, 2.0)
    assert (queue.made, queue.waits) == (66, 0)
    assert clock.time_ms()[1:] == [2.0] * 499


def test_a_host_that_runs_far_ahead_does_not_wait(queue: Queue) -> None:
    clock = StepClock()
    clock.device = torch.device("cuda", 0)
    queue.lags = 1000
    for _ in range(200):
        step(clock, queue, 2.0)
    assert (queue.made, queue.waits) == (200, 0)
    assert clock.time_ms()[1:] == [2.0] * 199


def test_a_step_that_is_captured_has_the_hosts_time(queue: Queue) -> None:
    clock = StepClock()
    clock.device = torch.device("cuda", 0)
    step(clock, queue, 2000.0)
    queue.capturing = True
    step(clock, queue, 2000.0)
    queue.capturing = False
    step(clock, queue, 2000.0)
    step(clock, queue, 2000.0)
    assert [time > 1000.0 for time in clock.time_ms()] == [False, False, False, True]


def test_a_device_that_has_failed_leaves_the_hosts_times(queue: Queue) -> None:
    clock = StepClock()
    clock.device = torch.device("cuda", 0)
    for _ in range(3):
        step(clock, queue, 2000.0)
    queue.fails = True
    assert all(time < 1000.0 for time in clock.time_ms())


@pytest.mark.usefixtures("queue")
def test_a_cpu_has_no_events(queue: Queue) -> None:
    recorder = StepRecorder()
    recorder.clock.device = torch.device("cpu")
    recorder.updated()
    recorder.close(skipped=False, scale=None)
    assert (queue.made, len(recorder.steps().time_ms)) == (0, 1)


def test_the_clock_is_that_of_the_device_trained_on() -> None:
    run = TorchRun(None)
    run.begin_on(torch.device("cpu"))
    run.begin_on(torch.device("cuda", 1))
    assert run.update.recorder.clock.device == torch.device("cuda", 1)


# --- the allocator's peaks ---------------------------------------------------------------------------------------------------


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    peaks = [100, 30]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(peaks))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks[device])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 2 * peaks[device])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peaks.__setitem__(device, 0))
    return peaks


def test_peaks_are_those_of_all_devices(allocator: list[int]) -> None:
    assert CudaPeaks().read(10) == Peaks(allocated=(100, 30), reserved=(200, 60))
    memory = CountedStep(TorchRun(None), in_region=lambda: True).memory()
    assert (memory.cuda_allocated_bytes, memory.cuda_reserved_bytes) == (130, 260)
    assert memory.cuda_allocated_bytes_by_device == [100, 30]
    allocator[1] = 0  # a second GPU that is not used
    assert CountedStep(TorchRun(None), in_region=lambda: True).memory().cuda_allocated_bytes_by_device == []


def test_peaks_leave_the_inspected_step_out(allocator: list[int]) -> None:
    peaks = CudaPeaks()
    peaks.reset(2)
    assert peaks.read(3).allocated == (100, 30)  # the third step may have ended before it reached its own peak
    allocator[:] = [60, 20]
    assert peaks.read(4).allocated == (60, 20)


def test_a_process_without_cuda_has_no_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)
    assert CudaPeaks().read(3) == Peaks()


def test_steps_whose_cpu_time_was_not_read_share_that_of_the_next_reading() -> None:
    clock = StepClock()
    began_s = clock._last_cpu_s
    reads = [0.002, None, None, 0.014, None]
    clock.add(*[(float(k), None if read is None else began_s + read, None) for k, read in enumerate(reads)])
    assert clock.cpu_ms() == pytest.approx([2.0, 4.0, 4.0, 4.0, 4.0])
    clock.add((5.0, began_s + 0.020, None))
    assert clock.cpu_ms() == pytest.approx([2.0, 4.0, 4.0, 4.0, 3.0, 3.0])
