"""Counts of a training run: closed windows, skipped updates, the norm of the last gradients. Values computed on the device stay there."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from mezzo.engine.scaling import Scale


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

    def measured(self, norm: Tensor) -> None:
        """Note the norm of the update's gradients, unscaled and before clipping."""
        self.last = norm, None

    def restore(self, *, updates: int, skipped: int) -> None:
        """Continue after so many updates that were made and skipped."""
        self.windows = updates + skipped
        self.skips.fill_(skipped)

    def in_place(self) -> Iterable[Tensor]:
        """Return the tensors that an update changes in place."""
        return self.skips, *self.floor.in_place()


# --- Notice without waiting that the loss scale is stuck at its floor -----------------------------------------------------------

# A flag on the device is set when gradients overflow at the floor. It is copied to the host without waiting, and the host
# reads the last copy that arrived: on a GPU perhaps an update or two late, which does no harm, since a scale at its floor
# stays there.
#
# Several processes must see the flag at the same update: otherwise one would raise and the others wait for it forever. So with
# several, it is copied only at every 64th update and read 32 updates later, when it has long arrived.

SEVERAL_EVERY = 64
"""Updates between two reads if several processes must see the same flag."""


class FloorWatch:
    """A flag on the device, and its last known value on the host."""

    def __init__(self, device: torch.device, *, several: bool = False) -> None:
        """Begin with the flag cleared.

        Args:
            device: the flag's device.
            several: whether several processes must see it at the same update. On a CPU they always do.
        """
        self._every, self._updates = (SEVERAL_EVERY if several and device.type != "cpu" else 1), 0
        self._sent = torch.cuda.Event() if self._every > 1 and device.type == "cuda" else None
        self._stuck = torch.zeros((), device=device)
        pinned = torch.zeros((), pin_memory=device.type == "cuda")
        self._arrived, self._value = pinned, pinned.numpy()

    def note(self, flags: Iterable[tuple[Scale, Tensor]]) -> None:
        """Set the flag if a scale is at its floor and its update overflowed."""
        for scale, found_inf in flags:
            self._stuck += found_inf * scale.floor_flag()
        self._updates += 1
        if self._updates % self._every == 0:
            # On devices other than CUDA nothing reports when an asynchronous copy has arrived.
            self._arrived.copy_(self._stuck, non_blocking=self._stuck.is_cuda)
            if self._sent is not None:
                self._sent.record(torch.cuda.current_stream(self._stuck.device))

    def in_place(self) -> Iterable[Tensor]:
        """Return the tensors that an update changes in place."""
        return self._stuck, self._arrived

    def reached(self) -> bool:
        """Return whether the flag was set in the copy that has arrived.

        Clear the flag, so that a caller who continues is warned only of a new overflow.
        """
        if self._updates % self._every != self._every // 2:
            return False
        if self._sent is not None:
            self._sent.synchronize()  # copied 32 updates ago: finished, unless the host runs that far ahead
        if not self._value > 0:
            return False
        self._stuck.zero_()
        self._arrived.zero_()
        return True
