"""Choose the kernels for a device once, with the reason."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch

from mezzo.engine.kernels import cpu, fused, reference

_FUSED_DEVICES = ("mps", "xpu")


@functools.cache
def choose(device_type: str) -> tuple[ModuleType, str]:
    """Return the module with the kernels for torch's device type, and why."""
    if device_type == "cpu":
        library, reason = cpu.library()
        return (cpu, reason) if library is not None else (fused, f"torch's fused kernels: {reason}")
    if device_type == "cuda":
        return _triton()
    if device_type in _FUSED_DEVICES:
        return fused, f"torch's fused kernels, with clipping and scale in grad_scale: Mezzo has none for {device_type}"
    return reference, f"plain torch operations: no fused kernels for {device_type}"


def _triton() -> tuple[ModuleType, str]:
    try:
        kernels = importlib.import_module("mezzo.engine.kernels.gpu")
        kernels.try_out(torch.device("cuda"))  # a Triton that cannot compile fails here, not in the first update
    except Exception as error:  # its compiler may raise anything
        return fused, f"torch's fused kernels: Triton does not work here ({type(error).__name__}: {error})"
    return kernels, "Triton kernels, one launch per group"
