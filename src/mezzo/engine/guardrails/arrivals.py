"""Copy the numbers of a training run to the host, which never waits for them.

On a CPU they are available at once. On a CUDA device a buffer collects 32 updates; it is copied to pinned memory, and read after an event
shows that the copy has arrived. Other devices have no such event, so nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_ROWS = 32

Row = tuple[int, tuple[float | None, ...]]
"""The number of a row, and its values; None for a value that was not added."""


class Arrivals:
    """Rows of numbers, in order."""

    def __init__(self, device: torch.device, columns: int) -> None:
        self._device = device
        self._ready: list[Row] = []
        self._open: list[tuple[int, list[bool]]] = []
        self._sent: tuple[list[tuple[int, list[bool]]], Tensor, torch.cuda.Event] | None = None
        self._rows = torch.zeros(_ROWS, columns, device=device) if device.type == "cuda" else None
        self._cells = [] if self._rows is None else [row.unbind() for row in self._rows.unbind()]

    def add(self, number: int, values: Sequence[Tensor | float | None]) -> None:
        """Add a row, without waiting for the device."""
        if self._device.type == "cpu":
            self._ready.append((number, tuple(None if value is None else float(value) for value in values)))
            return
        if self._rows is None:
            return
        for cell, value in zip(self._cells[len(self._open)], values, strict=True):
            if isinstance(value, Tensor):
                cell.copy_(value.detach())
            elif value is not None:
                cell.fill_(value)
        self._open.append((number, [value is not None for value in values]))
        if len(self._open) == _ROWS:
            self._send(self._rows)

    def _send(self, rows: Tensor) -> None:
        self._receive()
        if self._sent is not None:  # the last copy has not arrived: the host runs far ahead, so these rows are dropped
            self._open = []
            return
        pinned = torch.empty(rows.shape, pin_memory=True).copy_(rows, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._sent, self._open = (self._open, pinned, event), []

    def _receive(self) -> None:
        if self._sent is None or not self._sent[2].query():
            return
        (sent, pinned, _), self._sent = self._sent, None
        for (number, has), values in zip(sent, pinned.tolist(), strict=True):
            self._ready.append((number, tuple(v if known else None for v, known in zip(values, has, strict=True))))

    def arrived(self) -> Iterator[Row]:
        """Yield the rows that have arrived since the last call."""
        self._receive()
        ready, self._ready = self._ready, []
        yield from ready

    def forget(self) -> None:
        """Drop all rows that were not read yet."""
        self._ready, self._open, self._sent = [], [], None
