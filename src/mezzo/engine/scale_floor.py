"""Notice without waiting that the loss scale is stuck at its floor.

A flag on the device rises when gradients overflow at the floor. It is copied towards the host without waiting, and
what is looked at is the copy that has arrived: on a GPU perhaps an update or two late, which changes nothing, since a
scale at its floor stays there.

Several processes must not see it at different updates: one would raise and the others wait for it for ever. There the flag
is sent at every 64th update only and looked at 32 updates later, when it has long arrived.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mezzo.engine.scaling import Scale

TOGETHER = 64
"""Updates between two looks of processes that have to see the same."""


class FloorWatch:
    """A flag on the device, and its last known value on the host."""

    def __init__(self, device: torch.device, *, together: bool = False) -> None:
        """Begin with the flag down.

        Args:
            device: where the flag lives.
            together: whether other processes have to see it at the same update. On a CPU they do anyway.
        """
        self._every, self._noted = (TOGETHER if together and device.type != "cpu" else 1), 0
        self._sent = torch.cuda.Event() if self._every > 1 and device.type == "cuda" else None
        self._stuck = torch.zeros((), device=device)
        pinned = torch.zeros((), pin_memory=device.type == "cuda")
        self._arrived, self._value = pinned, pinned.numpy()

    def note(self, learned: Iterable[tuple[Scale, Tensor]]) -> None:
        """Raise the flag where a scale is at its floor and what it learns of an update, 1 for overflow or 0, is set."""
        for scale, found_inf in learned:
            self._stuck += found_inf * scale.floor_flag()
        self._noted += 1
        if self._noted % self._every == 0:
            self._arrived.copy_(
                self._stuck, non_blocking=self._stuck.is_cuda
            )  # else it is not known when it has arrived
            if self._sent is not None:
                self._sent.record(torch.cuda.current_stream(self._stuck.device))

    def in_place(self) -> Iterable[Tensor]:
        """Return the tensors that an update changes in place."""
        return self._stuck, self._arrived

    def reached(self) -> bool:
        """Return whether the flag was up in the copy that has arrived, and lower it: who goes on is told of the next time only."""
        if self._noted % self._every != self._every // 2:
            return False
        if self._sent is not None:
            self._sent.synchronize()  # of half a round ago: over, unless the host runs that far ahead
        if not self._value > 0:
            return False
        self._stuck.zero_()
        self._arrived.zero_()
        return True
