"""Learning rate schedulers that hold on a skipped update, without the host waiting to learn whether it was one.

Only the device knows whether an update was skipped. On a CPU asking costs nothing. On others the flag is sent towards the host
when the update is enqueued, and the schedulers step at the start of the next update, when it has long arrived: every
update gets the learning rate that it would have got, and ``scheduler.get_last_lr()`` shows the last update's until the next
begins. The host waits only if it runs a whole update ahead of the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Schedules:
    """Step schedulers after updates of their optimizers."""

    def __init__(self, schedulers: Sequence[Any], device: torch.device) -> None:
        self._schedulers = schedulers
        self._device = device
        self._flag = torch.zeros((), pin_memory=device.type == "cuda")
        self._sent = torch.cuda.Event() if device.type == "cuda" else None
        self._open: list[Any] | None = None
        """The optimizers of an update of which it is not known yet whether it was made."""

    def follow(self, optimizers: list[Any], skipped: Tensor | bool) -> None:
        """Take note of an update of ``optimizers``; ``skipped`` is above 0 if it was skipped."""
        if isinstance(skipped, bool) or self._device.type == "cpu":
            self._step(optimizers, skipped=bool(skipped))
            return
        self._flag.copy_(skipped, non_blocking=True)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self._device))
        self._open = optimizers

    def settle(self) -> None:
        """Step for the last update, if that is still open."""
        if self._open is None:
            return
        if self._sent is not None:
            self._sent.synchronize()
        optimizers, self._open = self._open, None
        self._step(optimizers, skipped=bool(self._flag))

    def _step(self, optimizers: list[Any], *, skipped: bool) -> None:
        for scheduler in self._schedulers:
            if not skipped and getattr(scheduler, "optimizer", optimizers[0]) in optimizers:
                scheduler.step()
