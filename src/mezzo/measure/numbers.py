"""Keep the numbers of a run on the device that computed them until all are read at once.

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


class Kept(NamedTuple):
    """A kept number: its buffer and its index."""

    where: Numbers
    number: int


class Numbers:
    """FP32 numbers of one device, in a buffer that grows by chunks."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._chunks: list[Tensor] = []
        self.place = CHUNK
        """Index of the next number in the open chunk; ``CHUNK`` if that is full."""
        self._cells: list[Any] = []
        """The memory of each chunk, as ``cells``."""
        self.cells: Any = None
        """The open chunk as a C array if it is in host memory: writing a float there takes a tenth of the time of ``Tensor.copy_``."""
        self.views: Sequence[Tensor] = ()
        """The elements of the open chunk, on devices only: making a view takes as long as copying into it."""
        self._sent: tuple[int, list[Tensor], torch.cuda.Event] | None = None
        """How many numbers are being copied to the host, their buffers there, and the event that marks the end of the copy."""
        self._arrived: list[float] = []

    def __len__(self) -> int:
        return self.first + self.place

    @property
    def first(self) -> int:
        """The number of the open chunk's first element."""
        return CHUNK * len(self._chunks) - CHUNK

    def keep(self, value: Tensor) -> Kept:
        """Copy a scalar tensor without waiting for the device."""
        if self.place == CHUNK:
            self.grow()
        (self.views or self._chunks[-1])[self.place].copy_(value)
        self.place += 1
        return Kept(self, len(self) - 1)

    def row(self, number: int) -> Tensor:
        """Return the tensor that holds a kept number."""
        return self._chunks[number // CHUNK][number % CHUNK]

    def on_host(self, number: int) -> float | None:
        """Return a kept number, or None if it is on a device and ``send`` has not copied it yet.

        Reads the memory directly: a call of torch would show up in the dispatch mode of a script or an observer.
        """
        if number < len(self._arrived):
            return self._arrived[number]
        cells = self._cells[number // CHUNK]
        return None if cells is None else cells[number % CHUNK]

    def send(self) -> None:
        """Send the numbers of a CUDA device to the host without waiting, or collect those that have arrived."""
        if self.device.type != "cuda":
            return
        if self._sent is None:
            count, first = len(self), len(self._arrived) // CHUNK
            held = [torch.empty(CHUNK, dtype=FP32.dtype, pin_memory=True) for _ in self._chunks[first:]]
            for here, chunk in zip(held, self._chunks[first:], strict=True):
                here.copy_(chunk, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
            self._sent = count, held, event
        elif self._sent[2].query():
            (count, held, _), self._sent = self._sent, None
            whole = len(self._arrived) // CHUNK * CHUNK
            self._arrived = [*self._arrived[:whole], *(value for one in held for value in one.tolist())][:count]

    def read(self) -> list[float]:
        """Return all numbers; waits for the device. All are NaN if the device has failed, as after an assertion in a kernel."""
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # they may have been computed on other streams
            found: list[float] = torch.cat(self._chunks).tolist() if self._chunks else []
        except RuntimeError:
            return [math.nan] * len(self)
        return found[: len(self)]

    def grow(self) -> None:
        """Add an empty chunk, which becomes the open one."""
        with torch.inference_mode(mode=False), torch.no_grad():
            chunk = torch.empty(CHUNK, dtype=FP32.dtype, device=self.device)
            in_host_memory = self.device.type == "cpu" and type(chunk) is Tensor and chunk.data_ptr()
            self.views = () if in_host_memory else chunk.unbind()
        self._chunks.append(chunk)
        self.cells = (ctypes.c_float * CHUNK).from_address(chunk.data_ptr()) if in_host_memory else None
        self.place = 0
        self._cells.append(self.cells)
