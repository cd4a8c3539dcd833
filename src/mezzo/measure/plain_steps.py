"""Record every training step of a framework that is not torch. Imports no framework.

Losses and norms are kept as given, as numbers or as a framework's scalars on its device, and read once at the end.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Mapping, Sequence
from typing import SupportsFloat

from mezzo.measure.live import Reports
from mezzo.measure.separate_losses import Owners, SeparateLosses
from mezzo.records import Loss, Steps


class PlainSteps:
    """A recorder of a run's steps; a step is everything between two updates."""

    def __init__(self) -> None:
        self._loss: list[Sequence[SupportsFloat]] = []
        self._norm: list[SupportsFloat] = []
        self._scale: list[float | None] = []
        self._skipped: list[bool] = []
        self._time_ms: list[float] = []
        self._cpu_ms: list[float] = []
        self._open: list[SupportsFloat] = []
        self._separate_losses: SeparateLosses[list[SupportsFloat]] = SeparateLosses(operator.add)
        self._started = self._now()
        self.reports = Reports()
        """Reports of the latest numbers while the script runs."""

    @property
    def num_closed(self) -> int:
        """Number of closed steps."""
        return len(self._loss)

    def loss(self, loss: SupportsFloat) -> None:
        """Add a loss to the open step: micro-batches and several losses add up."""
        self._open.append(loss)
        self._separate_losses.add([loss])

    def close(
        self,
        *,
        skipped: bool,
        scale: float | None,
        norm: SupportsFloat = math.nan,
        made_by: Owners = frozenset(),
    ) -> None:
        """Close the open step now.

        Args:
            skipped: whether its update was skipped.
            scale: the loss scale after it, None if none is used.
            norm: the norm of its unscaled gradients, NaN if unknown.
            made_by: the optimizers that made its update, by number.
        """
        now = self._now()
        self._loss.append(self._open or [math.nan])
        self._norm.append(norm)
        self._scale.append(scale)
        self._skipped.append(skipped)
        self._time_ms.append((now[0] - self._started[0]) * 1e3)
        self._cpu_ms.append((now[1] - self._started[1]) * 1e3)
        self._separate_losses.close(len(self._loss), made_by=made_by)
        self._open, self._started = [], now
        if now[0] >= self.reports.due_s:
            self.reports.send(now[0], loss=_on_host(self._loss[-1]), skipped=self._skipped)

    def steps(self, names: Mapping[int, str] | None = None) -> Steps:
        """Return every closed step; reads what is still on a device.

        Args:
            names: names of what the optimizers train, by optimizer number, if known.
        """
        columns = self._separate_losses.columns(names or {})
        return Steps(
            loss=[_sum(losses) for losses in self._loss],
            losses=[Loss(name=n, steps=c.steps, values=[_sum(v) for v in c.values]) for n, c in columns.items()],
            loss_scale=known_scales(self._scale),
            skipped=list(self._skipped),
            grad_norm=[float(norm) for norm in self._norm],
            time_ms=list(self._time_ms),
            cpu_ms=list(self._cpu_ms),
        )

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()


def _on_host(losses: Sequence[SupportsFloat]) -> float | None:
    """Return the sum of losses that are numbers already; None for a framework's scalars, which may be on a device."""
    return _sum(losses) if all(isinstance(loss, (int, float)) for loss in losses) else None


def _sum(losses: Sequence[SupportsFloat]) -> float:
    return sum(map(float, losses))


def known_scales(scales: Sequence[float | None]) -> list[float]:
    """Return one scale per step, NaN for steps before the first; empty for a run that never had one."""
    if all(scale is None for scale in scales):
        return []
    return [math.nan if scale is None else scale for scale in scales]
