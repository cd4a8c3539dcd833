"""Keep the numbers of a run on the device that computed them, to be read all at once.

One tensor per number would take 512 bytes of GPU memory each; one read per number would make each step wait for the device.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mezzo.formats import FP32

CHUNK = 512
"""How many numbers fit into one chunk of a buffer."""


class StoredNumber(NamedTuple):
    """A stored number: its buffer and its position there."""

    buffer: NumberBuffer
    position: int


class NumberBuffer:
    """FP32 numbers of one device, in a buffer that grows by chunks."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._chunks: list[Tensor] = []
        self.next_index = CHUNK
        """Index of the next number in the open chunk; ``CHUNK`` if that is full."""
        self._cells: list[Any] = []
        """The memory of each chunk, as ``cells``."""
        self.cells: Any = None
        """The open chunk as a C array if it is in host memory: writing a float there takes a tenth of the time of ``Tensor.copy_``."""
        self.views: Sequence[Tensor] = ()
        """The elements of the open chunk, on devices only: making a view takes as long as copying into it."""
        self._transfer: tuple[int, list[Tensor], torch.cuda.Event] | None = None
        """How many numbers are being copied to the host, their buffers there, and the event that marks the end of the copy."""
        self._arrived: list[float] = []

    def __len__(self) -> int:
        return self.chunk_start + self.next_index

    @property
    def chunk_start(self) -> int:
        """The index of the open chunk's first element."""
        return CHUNK * len(self._chunks) - CHUNK

    def keep(self, value: Tensor) -> StoredNumber:
        """Copy a scalar tensor without waiting for the device."""
        if self.next_index == CHUNK:
            self.grow()
        (self.views or self._chunks[-1])[self.next_index].copy_(value)
        self.next_index += 1
        return StoredNumber(self, len(self) - 1)

    def tensor_at(self, index: int) -> Tensor:
        """Return a stored number as a tensor on its device."""
        return self._chunks[index // CHUNK][index % CHUNK]

    def on_host(self, index: int) -> float | None:
        """Return a stored number, or None if it is on a device and ``send`` has not copied it yet.

        Reads the memory directly: a torch call would show up in the dispatch mode of a script or an observer.
        """
        if index < len(self._arrived):
            return self._arrived[index]
        cells = self._cells[index // CHUNK]
        return None if cells is None else cells[index % CHUNK]

    def send(self) -> None:
        """Send the numbers of a CUDA device to the host without waiting, or collect those that have arrived."""
        if self.device.type != "cuda":
            return
        if self._transfer is None:
            count, first = len(self), len(self._arrived) // CHUNK
            copies = [torch.empty(CHUNK, dtype=FP32.dtype, pin_memory=True) for _ in self._chunks[first:]]
            for copy, chunk in zip(copies, self._chunks[first:], strict=True):
                copy.copy_(chunk, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
            self._transfer = count, copies, event
        elif self._transfer[2].query():
            (count, copies, _), self._transfer = self._transfer, None
            whole = len(self._arrived) // CHUNK * CHUNK
            self._arrived = [*self._arrived[:whole], *(value for copy in copies for value in copy.tolist())][:count]

    def read(self) -> list[float]:
        """Return all numbers; waits for the device. All are NaN if the device has failed, for example after an assertion in a kernel."""
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # they may have been computed on other streams
            numbers: list[float] = torch.cat(self._chunks).tolist() if self._chunks else []
        except RuntimeError:
            return [math.nan] * len(self)
        return numbers[: len(self)]

    def grow(self) -> None:
        """Add an empty chunk, which becomes the open one."""
        with torch.inference_mode(mode=False), torch.no_grad():
            chunk = torch.empty(CHUNK, dtype=FP32.dtype, device=self.device)
            in_host_memory = self.device.type == "cpu" and type(chunk) is Tensor and chunk.data_ptr()
            self.views = () if in_host_memory else chunk.unbind()
        self._chunks.append(chunk)
        self.cells = (ctypes.c_float * CHUNK).from_address(chunk.data_ptr()) if in_host_memory else None
        self.next_index = 0
        self._cells.append(self.cells)
