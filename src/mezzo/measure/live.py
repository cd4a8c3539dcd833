"""The latest numbers of a running training, for people who wait for it. Imports no framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias


class Latest(NamedTuple):
    """What the host knows about a running training."""

    step: int
    """Number of closed steps."""
    loss: float | None = None
    """The last step's loss; None if only the device knows it."""
    num_skipped: int | None = None
    """Skipped updates so far; None if only the device knows."""
    waits: str = ""
    """What the training waits for, in a few words."""
    loss_scale: float | None = None
    """None if there is none, or only the device knows it."""
    grad_norm: float | None = None
    """The last one measured; None if only the device knows it."""
    shares: dict[str, float] | None = None
    """Waits as shares of the time since the run began, and the GPU's counters; None where they are not measured."""


Report: TypeAlias = Callable[[Latest], None]


class Reports:
    """Reports of a training's latest numbers, at most one every ``every_s`` seconds."""

    def __init__(self) -> None:
        self.due_s = math.inf
        """Value of ``time.perf_counter`` from which the next report is due: all that a step compares."""
        self._every_s = math.inf
        self._report: Report = lambda latest: None
        self._num_read = 0
        self._num_skipped: int | None = 0

    def begin(self, report: Report, *, every_s: float) -> None:
        """Report to ``report`` from now on."""
        self._report, self._every_s, self.due_s = report, every_s, 0.0

    def send(
        self,
        now_s: float,
        *,
        loss: float | None,
        skipped: Sequence[object],
        loss_scale: float | None = None,
        grad_norm: float | None = None,
    ) -> None:
        """Report the numbers at ``now_s``.

        Args:
            now_s: the time by ``time.perf_counter``.
            loss: the loss of the last closed step; None if only the device knows it.
            loss_scale: the loss scale after that step, if the host knows it.
            grad_norm: the gradient norm measured last, if the host knows it.
            skipped: whether the update of each step was skipped; a value that is not a bool is known only to the device.
        """
        self.due_s = now_s + self._every_s
        new = skipped[self._num_read :]
        self._num_read += len(new)
        known = self._num_skipped is not None and all(isinstance(flag, bool) for flag in new)
        self._num_skipped = (self._num_skipped or 0) + sum(flag is True for flag in new) if known else None
        latest = Latest(step=len(skipped), loss=loss, num_skipped=self._num_skipped)
        self._report(latest._replace(loss_scale=loss_scale, grad_norm=grad_norm))
