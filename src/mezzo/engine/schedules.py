"""Learning rate schedulers that do not step after a skipped update, without making the host wait.

Only the device knows whether an update was skipped. On a CPU reading the flag costs nothing. On other devices the flag is copied to
the host when the update is enqueued, and the schedulers step at the start of the next update, when it has long arrived: each
update has the right learning rate, and ``scheduler.get_last_lr()`` shows the last update's until the next begins. The host
waits only if it runs a whole update ahead of the device.
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
        self._pending: list[Any] | None = None
        """The optimizers of an update of which the host does not know yet whether it was skipped."""
        self._counts: dict[int, int] = {}
        """Each scheduler's number of steps after the session last stepped it, by id."""
        self._stepped_elsewhere = 0
        """How many updates in a row came after other code had stepped a scheduler."""
        self._warned = False
        self._rates: tuple[int, list[float]] = (-2, [])
        """The window of the last update that was skipped, and its learning rates."""

    def follow(self, optimizers: list[Any], skipped: Tensor | bool) -> None:
        """Register an update of ``optimizers``; ``skipped`` is above 0 if it was skipped."""
        if isinstance(skipped, bool) or self._device.type == "cpu":
            self._step(optimizers, skipped=bool(skipped))
            return
        # Only CUDA has an event to wait for: on other devices an asynchronous copy might be read too early.
        self._flag.copy_(skipped, non_blocking=self._sent is not None)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self._device))
        self._pending = optimizers

    def settle(self) -> None:
        """Step the schedulers for the last update, if that is still pending."""
        if self._pending is None:
            return
        if self._sent is not None:
            self._sent.synchronize()
        optimizers, self._pending = self._pending, None
        self._step(optimizers, skipped=bool(self._flag))

    def _step(self, optimizers: list[Any], *, skipped: bool) -> None:
        self._check()
        for scheduler in self._schedulers:
            if not skipped and getattr(scheduler, "optimizer", optimizers[0]) in optimizers:
                scheduler.step()
        self._counts = {id(scheduler): _count(scheduler) for scheduler in self._schedulers}

    def _check(self) -> None:
        """Warn of schedulers that the script also steps; loading a state moves one as well, but only once."""
        moved = [s for s in self._schedulers if _count(s) > self._counts.get(id(s), math.inf)]
        self._stepped_elsewhere = self._stepped_elsewhere + 1 if moved else 0
        if self._stepped_elsewhere == 2:
            warn(
                f"{type(moved[0]).__name__} is stepped by the script and by the session, so it runs ahead; remove scheduler.step(), "
                "or leave scheduler= out of Session(...)"
            )

    def skipped(self, optimizers: list[Any], *, window: int) -> None:
        """Warn of a learning rate that changes between two skipped updates: the script steps a scheduler itself."""
        before = self._rates
        rates = [float(group["lr"]) for o in optimizers for group in o.param_groups if "lr" in group]
        moved = before[0] == window - 1 and before[1] != rates and len(before[1]) == len(rates)
        if moved and not self._warned:
            self._warned = True
            warn(
                "the learning rate changed from one skipped update to the next: a scheduler is stepped where nothing was updated; pass it "
                "as Session(..., scheduler=scheduler), which then makes it wait, and remove scheduler.step()"
            )
        self._rates = window, rates


def _count(scheduler: Any) -> int:
    return int(getattr(scheduler, "_step_count", getattr(scheduler, "last_epoch", 0)))
