"""Learning rate schedulers that hold on a skipped update, without the host waiting to learn whether it was one.

Only the device knows whether an update was skipped. On a CPU asking costs nothing. On others the flag is sent towards the host
when the update is enqueued, and the schedulers step at the start of the next update, when it has long arrived: every
update gets the learning rate that it would have got, and ``scheduler.get_last_lr()`` shows the last update's until the next
begins. The host waits only if it runs a whole update ahead of the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mezzo.engine.checks import warn


class Schedules:
    """Learning rate schedulers that step after updates of their optimizers."""

    def __init__(self, schedulers: Sequence[Any], device: torch.device) -> None:
        self._schedulers = schedulers
        self._device = device
        self._flag = torch.zeros((), pin_memory=device.type == "cuda")
        self._sent = torch.cuda.Event() if device.type == "cuda" else None
        self._open: list[Any] | None = None
        """The optimizers of an update of which it is not known yet whether it was made."""
        self._counts: dict[int, int] = {}
        """By a scheduler's id: how often it had stepped when it was left alone."""
        self._strange = 0
        """Updates in a row before which a scheduler had stepped in between."""
        self._told = False
        self._rates: tuple[int, list[float]] = (-2, [])
        """The window of the last update that was skipped, and its learning rates."""

    def follow(self, optimizers: list[Any], skipped: Tensor | bool) -> None:
        """Take note of an update of ``optimizers``; ``skipped`` is above 0 if it was skipped."""
        if isinstance(skipped, bool) or self._device.type == "cpu":
            self._step(optimizers, skipped=bool(skipped))
            return
        # Only CUDA has an event to wait for: a copy that is not known to be over would be read too early.
        self._flag.copy_(skipped, non_blocking=self._sent is not None)
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
        self._look()
        for scheduler in self._schedulers:
            if not skipped and getattr(scheduler, "optimizer", optimizers[0]) in optimizers:
                scheduler.step()
        self._counts = {id(scheduler): _count(scheduler) for scheduler in self._schedulers}

    def _look(self) -> None:
        """Warn of schedulers that the script steps as well; a state that is loaded moves one once, too."""
        moved = [s for s in self._schedulers if _count(s) > self._counts.get(id(s), math.inf)]
        self._strange = self._strange + 1 if moved else 0
        if self._strange == 2:
            warn(
                f"{type(moved[0]).__name__} is stepped by the script and by the session, so that it runs ahead; take scheduler.step() "
                "out, or leave scheduler= out of Session(...)"
            )

    def skipped(self, optimizers: list[Any], *, window: int) -> None:
        """Warn of a learning rate that changes from one skipped update to the next: a scheduler is stepped by hand."""
        before = self._rates
        rates = [float(group["lr"]) for o in optimizers for group in o.param_groups if "lr" in group]
        moved = before[0] == window - 1 and before[1] != rates and len(before[1]) == len(rates)
        if moved and not self._told:
            self._told = True
            warn(
                "the learning rate changed from one skipped update to the next: a scheduler is stepped where nothing was updated; pass it "
                "as Session(..., scheduler=scheduler), which holds it then, and take scheduler.step() out"
            )
        self._rates = window, rates


def _count(scheduler: Any) -> int:
    return int(getattr(scheduler, "_step_count", getattr(scheduler, "last_epoch", 0)))
