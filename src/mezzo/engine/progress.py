"""Counts of a training: closed windows, skipped updates, the norm of the last gradients. Values computed on the device stay there."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from mezzo.engine.scale_floor import FloorWatch


class Progress:
    """The counts of one session, and whether its loss scale is stuck at the floor."""

    def __init__(self, device: torch.device, *, together: bool) -> None:
        """Begin at zero.

        Args:
            device: the session's device.
            together: whether several processes train, which must notice a stuck scale at the same update.
        """
        self.windows = 0
        """Updates, skipped ones included."""
        self.skips = torch.zeros((), device=device)
        self._norm = torch.full((), math.nan, device=device)
        self._factor: Tensor | None = None
        """The factor by which ``_norm`` must still be multiplied, once a loop reads it; None for 1."""
        self.floor = FloorWatch(device, together=together)

    @property
    def norm(self) -> Tensor:
        """The norm of the last update's gradients, unscaled and before clipping."""
        if self._factor is not None:
            self._norm, self._factor = self._norm * self._factor, None
        return self._norm

    @norm.setter
    def norm(self, norm: Tensor) -> None:
        self._norm, self._factor = norm, None

    def took(self, norm: Tensor, factor: Tensor | None) -> None:
        """Record the norm of gradients that ``factor`` unscales and averages; None for 1."""
        self._norm, self._factor = norm, factor

    def in_place(self) -> Iterable[Tensor]:
        """Return the tensors that an update changes in place."""
        return self.skips, *self.floor.in_place()
