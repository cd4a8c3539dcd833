"""Two stand-in devices: what copies from all of them waits for all of them, and not for the current one only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mezzo.devices import cuda_devices_in_use
from mezzo.engine.snapshots.background import Copies
from mezzo.launch.torch.out_of_memory import memory_of_devices
from mezzo.observe.audit import observer


class OnDevice:
    """A tensor that says it is on a device; its values are on the host."""

    is_cuda = True

    def __init__(self, number: int) -> None:
        self.device, self.values = torch.device("cuda", number), torch.ones(2)
        self.shape, self.dtype = self.values.shape, self.values.dtype

    def stride(self) -> tuple[int, ...]:
        return self.values.stride()


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    devices: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: devices.append(device))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=0: {0: 100, 1: 20, 2: 0}[device])
    return devices


def test_copies_wait_for_every_device_that_they_come_from(waited: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    copied = SimpleNamespace(copy_=lambda tensor, non_blocking: None)
    monkeypatch.setattr(torch, "empty_like", lambda *_, **__: copied)
    tensors: Any = {"a": OnDevice(0), "b": OnDevice(1), "c": OnDevice(1)}

    Copies().of(tensors)

    assert sorted(map(str, waited)) == ["cuda:0", "cuda:1"]


def test_a_profile_ends_when_every_device_in_use_has_finished(waited: list[Any]) -> None:
    watch = observer.KernelWatch()
    watch._profiler = SimpleNamespace(__exit__=lambda *_: None, events=list)

    assert watch.stop() == []
    assert waited == [0, 1]


def test_devices_in_use_are_those_with_memory(waited: list[Any]) -> None:
    assert cuda_devices_in_use() == [0, 1]


def test_memory_of_all_devices_in_use_is_counted(waited: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1000 + device))

    assert memory_of_devices() == (120, 2001)
