"""Numbers of a training on their way to the host, which never waits for them.

On a CPU they are there at once. On a CUDA device 32 updates are kept in one buffer, which is sent to pinned memory and read once an event
says that it has arrived. Elsewhere nothing says so, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_ROWS = 32

Row = tuple[int, tuple[float | None, ...]]
"""A number given with the row, and its values; None for one that was not given."""


class Arrivals:
    """Rows of numbers, in order."""

    def __init__(self, device: torch.device, columns: int) -> None:
        self._device = device
        self._here: list[Row] = []
        self._open: list[tuple[int, list[bool]]] = []
        self._sent: tuple[list[tuple[int, list[bool]]], Tensor, torch.cuda.Event] | None = None
        self._rows = torch.zeros(_ROWS, columns, device=device) if device.type == "cuda" else None
        self._cells = [] if self._rows is None else [row.unbind() for row in self._rows.unbind()]

    def add(self, number: int, values: Sequence[Tensor | float | None]) -> None:
        """Add a row, without waiting for the device."""
        if self._device.type == "cpu":
            self._here.append((number, tuple(None if value is None else float(value) for value in values)))
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
        self._take()
        if self._sent is not None:  # the last ones are still under way: the host runs far ahead, and these are left out
            self._open = []
            return
        pinned = torch.empty(rows.shape, pin_memory=True).copy_(rows, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._sent, self._open = (self._open, pinned, event), []

    def _take(self) -> None:
        if self._sent is None or not self._sent[2].query():
            return
        (given, pinned, _), self._sent = self._sent, None
        for (number, has), values in zip(given, pinned.tolist(), strict=True):
            self._here.append((number, tuple(v if known else None for v, known in zip(values, has, strict=True))))

    def arrived(self) -> Iterator[Row]:
        """Yield the rows that have arrived since the last call."""
        self._take()
        here, self._here = self._here, []
        yield from here

    def forget(self) -> None:
        """Drop what is under way."""
        self._here, self._open, self._sent = [], [], None
