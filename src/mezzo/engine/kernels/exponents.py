"""Count the magnitudes of tensors by exponent, on every device, in tables with the layout of ``exponent_bins``."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from mezzo.engine.kernels import cpu
from mezzo.engine.kernels.exponent_bins import BINS, CELLS, CUTS
from mezzo.engine.kernels.storage import dense
from mezzo.formats import BF16, FP16, FP32

_MANTISSA = FP32.mantissa_bits
_COUNTED = (FP32.dtype, FP16.dtype, BF16.dtype)

CountExponents: TypeAlias = Callable[[Sequence[Tensor], Sequence[Tensor]], None]


def tables(count: int, device: torch.device | str = "cpu") -> Tensor:
    """Return ``count`` empty tables."""
    return torch.zeros(count, BINS, dtype=torch.int64, device=device)


def add(tensors: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    """Count the elements of each tensor into its table, which is on the same device; tensors may share a table."""
    countable = [t if t.dtype in _COUNTED and t.is_contiguous() else _prepared(t) for t in tensors]
    if all(t.is_cpu for t in countable):  # the usual case: one call for all
        counter("cpu")[0](countable, rows)
        return
    for device_type in dict.fromkeys(t.device.type for t in countable):
        places = [i for i, t in enumerate(countable) if t.device.type == device_type]
        counter(device_type)[0]([countable[i] for i in places], [rows[i] for i in places])


def _prepared(tensor: Tensor) -> Tensor:
    values = tensor.detach()
    return dense(values if values.dtype in _COUNTED else values.float())


@functools.cache
def counter(device_type: str) -> tuple[CountExponents, str]:
    """Return the counting kernel for torch's device type, and why."""
    if device_type == "cpu":
        lib, reason = cpu.library()
        return (_compiled, reason) if lib is not None else (reference, f"plain torch operations: {reason}")
    if device_type == "cuda":
        if torch.cuda.get_device_capability() < (7, 0) and torch.version.hip is None:
            return reference, "plain torch operations: the Triton kernel needs compute capability 7.0"
        try:
            kernels = importlib.import_module("mezzo.engine.kernels.gpu")
            # A Triton that cannot compile fails here, not in the first observed step.
            kernels.count([torch.ones(1, device="cuda")], [tables(1, "cuda")[0]])
        except Exception as error:  # its compiler may raise anything
            return reference, f"plain torch operations: Triton does not work here ({type(error).__name__}: {error})"
        return kernels.count, "a Triton kernel, one launch for all tensors of a format"
    return reference, f"plain torch operations: Mezzo has no kernel for {device_type}"


def reference(tensors: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    """Count in plain torch operations: the reference for tests of the kernels."""
    cuts = {}
    for tensor, row in zip(tensors, rows, strict=True):
        if tensor.device not in cuts:
            cuts[tensor.device] = torch.tensor(CUTS, dtype=torch.int32, device=tensor.device)
        magnitude = tensor.detach().reshape(-1).float().abs()
        bits = magnitude.view(torch.int32)
        # FP32's subnormals are made normal by a shift of 24 places, which is subtracted from their row again; zero ends below row 0.
        raised = (magnitude * 2.0**24).view(torch.int32) - (24 << _MANTISSA)
        bits = torch.where(bits < 1 << _MANTISSA, raised, bits)
        cell = torch.bucketize(bits & (1 << _MANTISSA) - 1, cuts[tensor.device], out_int32=True, right=True)
        place = ((bits >> _MANTISSA) + 23).clamp_(min=0) * CELLS + cell
        row += torch.bincount(place, minlength=BINS)


def _compiled(tensors: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    cpu.exponents(tensors, rows, CUTS)
