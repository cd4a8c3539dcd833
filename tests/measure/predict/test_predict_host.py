"""What a step takes the host, counted by hand; this machine's, within what any machine takes."""

from __future__ import annotations

import pytest
import torch

from mezzo.gpus import gpu_named
from mezzo.measure.predict import calibrate
from mezzo.measure.predict.host import SERVER, Host, host_of, measured
from mezzo.measure.predict.step import Conditions
from mezzo.measure.predict.tape import CostedOperation, TapePhase, TrainingTape


def _operations(phase: TapePhase, count: int) -> list[CostedOperation]:
    return [CostedOperation("add", phase, "", "fp32", 0, 4, 4)] * count


def test_operations_of_updates_take_less() -> None:
    host = Host(operation_s=10e-6, source="")
    operations = [*_operations("forward", 30), *_operations("backward", 60), *_operations("optimizer", 100)]
    assert host.seconds(operations) == 10e-6 * (90 + 24)


def test_the_host_bounds_a_step_of_small_operations_and_a_capture_frees_it() -> None:
    tape = TrainingTape(batch=1, operations=_operations("forward", 1000))
    fast, slow = (Host(operation_s=seconds, source="") for seconds in (1e-9, 1e-3))
    on = {host: Conditions(gpu=gpu_named("a100"), host=host).step(tape, "fp32") for host in (fast, slow)}
    assert 1.0 <= on[slow].seconds < 1.0001
    assert on[slow].captured_s == on[fast].captured_s < on[fast].seconds * 1.0001
    assert on[slow].bounds() == {"arithmetic": 0.0, "bandwidth": 0.0, "launch": 1.0}
    assert Conditions(gpu=gpu_named("a100")).host is SERVER


def test_this_machine_is_measured_without_changing_its_threads() -> None:
    threads = torch.get_num_threads()
    host = measured()
    assert torch.get_num_threads() == threads
    assert 1e-6 < host.operation_s < 10e-3
    assert host.source.startswith("this machine")


def test_the_gpu_of_this_machine_has_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_of(gpu_named("a100")) is SERVER  # no GPU here
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(calibrate, "device_name", lambda kind: "Tesla T4")
    assert host_of(gpu_named("a100")) is SERVER
    found = host_of(gpu_named("t4"))
    assert found.source.startswith("this machine")
    assert host_of(gpu_named("t4")) is found  # measured once
    assert found.note.reason == found.source
