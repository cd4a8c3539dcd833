"""Notice without waiting that the loss scale is stuck at its floor.

A flag on the device rises when gradients overflow at the floor. It is copied towards the host without waiting, and
what is looked at is the copy that has arrived: on a GPU perhaps an update or two late, which changes nothing, since a
scale at its floor stays there.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mezzo.engine.scaling import Scale


class FloorWatch:
    """Keep a flag on the device and its last known value on the host."""

    def __init__(self, device: torch.device) -> None:
        self._stuck = torch.zeros((), device=device)
        pinned = torch.zeros((), pin_memory=device.type == "cuda")
        self._arrived, self._value = pinned, pinned.numpy()

    def note(self, learned: Iterable[tuple[Scale, Tensor]]) -> None:
        """Raise the flag where a scale is at its floor and what it learns of an update, 1 for overflow or 0, is set."""
        for scale, found_inf in learned:
            self._stuck += found_inf * scale.floor_flag()
        self._arrived.copy_(self._stuck, non_blocking=True)

    def reached(self) -> bool:
        """Return whether the flag was up in the copy that has arrived, and lower it: who goes on is told of the next time only."""
        if not self._value > 0:
            return False
        self._stuck.zero_()
        self._arrived.zero_()
        return True
