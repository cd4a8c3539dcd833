"""A driver for Triton that stands in for NVIDIA's: it says which GPU there is, takes binaries and counts launches.

Everything before that, from the arguments' specialization to the assembler, is what runs on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

loaded: list[tuple[str, bytes]] = []
"""Name and machine code of every kernel, as they were loaded."""
launched: list[int] = []
"""How many programs every launch had."""


class Utils:
    def __init__(self, capability: int) -> None:
        self._capability = capability

    def load_binary(self, name: str, binary: bytes, *_: Any) -> tuple[int, ...]:
        loaded.append((name, binary))
        return (1, 2, 32, 0, 1024)

    def get_device_properties(self, device: int) -> dict[str, int]:
        known = {
            "max_shared_mem": 101376 if self._capability != 75 else 65536,
            "multiprocessor_count": 100,
            "warpSize": 32,
        }
        return {**known, "max_num_regs": 65536, "sm_clock_rate": 1, "mem_clock_rate": 1, "mem_bus_width": 1}


class Launcher:
    def __init__(self, source: Any, metadata: Any) -> None: ...

    def __call__(self, x: int, y: int, z: int, *_: Any) -> None:
        launched.append(x * y * z)


class Driver:
    launcher_cls = Launcher

    def __init__(self, capability: int, device_type: str) -> None:
        self.utils, self._capability, self._device_type = Utils(capability), capability, device_type

    def get_current_device(self) -> int:
        return torch.cuda.current_device() if self._device_type == "cuda" else 0

    def set_current_device(self, device: int) -> None: ...

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device(self._device_type, self.get_current_device())

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    @staticmethod
    def is_active() -> bool:
        return True


def install(capability: int, *, device_type: str = "cpu") -> None:
    """Let Triton compile for a GPU of this capability from here on, with tensors of ``device_type``."""
    driver.set_active(Driver(capability, device_type))
