"""Counts of a training run: closed windows, skipped updates, the norm of the last gradients. Values computed on the device stay there."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from mezzo.engine.scale_floor import FloorWatch


class Progress:
    """The counts of one session, and whether its loss scale is stuck at the floor."""

    def __init__(self, device: torch.device, *, several: bool) -> None:
        """Begin at zero.

        Args:
            device: the session's device.
            several: whether several processes train, which must notice a stuck scale at the same update.
        """
        self.windows = 0
        """Updates, skipped ones included."""
        self.skips = torch.zeros((), device=device)
        self.last: tuple[Tensor, Tensor | None] = torch.full((), math.nan, device=device), None
        """The norm of the last gradients as they were, and the factor that unscales and averages them (None for 1)."""
        self.floor = FloorWatch(device, several=several)

    @property
    def norm(self) -> Tensor:
        """The norm of the last update's gradients, unscaled and before clipping; multiplied only if a loop reads it."""
        norm, factor = self.last
        if factor is not None:
            norm = norm * factor
            self.last = norm, None
        return norm

    @norm.setter
    def norm(self, norm: Tensor) -> None:
        self.last = norm, None

    def in_place(self) -> Iterable[Tensor]:
        """Return the tensors that an update changes in place."""
        return self.skips, *self.floor.in_place()
