"""Counts of a training: windows closed, updates skipped, the norm of the last gradients. The device keeps what only it knows."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from mezzo.engine.scale_floor import FloorWatch


class Progress:
    """The counts of one session, and whether its loss scale is stuck at the floor."""

    def __init__(self, device: torch.device, *, together: bool) -> None:
        """Start at zero.

        Args:
            device: the session's.
            together: whether several processes train, which have to notice a stuck scale at the same update.
        """
        self.windows = 0
        """Updates, skipped ones included."""
        self.skips = torch.zeros((), device=device)
        self.norm = torch.full((), math.nan, device=device)
        """The norm of the last update's gradients, unscaled and before clipping."""
        self.floor = FloorWatch(device, together=together)

    def in_place(self) -> Iterable[Tensor]:
        """Return the tensors that an update changes in place."""
        return self.skips, *self.floor.in_place()
