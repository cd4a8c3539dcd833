"""Peaks of the CUDA allocator over all devices that the process uses, without the inspected step.

Where compiled code runs eagerly in the inspected step, that step takes more memory than the others. So the counters are reset when it
ends; the peaks up to then count only if no further step follows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Peaks:
    """The peaks of each device in bytes, by device number; empty where CUDA is not in use."""

    allocated: tuple[int, ...] = ()
    reserved: tuple[int, ...] = ()


class CudaPeaks:
    """The allocator's peaks over a run."""

    def __init__(self) -> None:
        self._until_reset: Peaks | None = None
        self._num_steps = 0

    def reset(self, num_steps: int) -> None:
        """Reset the counters after ``num_steps`` steps."""
        peaks = _read()
        if peaks.allocated:
            self._until_reset, self._num_steps = peaks, num_steps
            for device in range(len(peaks.allocated)):
                torch.cuda.reset_peak_memory_stats(device)

    def read(self, num_steps: int) -> Peaks:
        """Return the peaks of a run that made ``num_steps`` steps."""
        if self._until_reset is not None and num_steps <= self._num_steps + 1:
            return self._until_reset
        return _read()


def _read() -> Peaks:
    # Only if the process already uses CUDA: the query would initialise it.
    if not torch.cuda.is_initialized():
        return Peaks()
    devices = range(torch.cuda.device_count())
    return Peaks(
        allocated=tuple(torch.cuda.max_memory_allocated(device) for device in devices),
        reserved=tuple(torch.cuda.max_memory_reserved(device) for device in devices),
    )
