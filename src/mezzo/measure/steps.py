"""Record every training step: loss, loss scale, skipped or not, gradient norm, time.

Losses, norms, scales and flags stay on their device and are read once at the end: reading them in every step would make it wait for the
device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mezzo.measure.apart import LossesApart, Owners
from mezzo.measure.live import Reports
from mezzo.measure.numbers import Kept, Numbers
from mezzo.measure.plainsteps import known_scales
from mezzo.measure.stepclock import StepClock
from mezzo.records import Loss, Steps

Losses = tuple[Kept, ...]
"""Losses whose sum is the step's loss."""


class StepRecorder:
    """A recorder of a run's steps; a step is everything between two updates."""

    def __init__(self) -> None:
        self._numbers: dict[torch.device, Numbers] = {}
        self._loss: list[Losses] = []
        self._weight: list[float] = []
        """Factor of each step's losses."""
        self._norm: list[tuple[Kept, ...]] = []
        """For each step, the norms of the optimizers that made its update."""
        self._scale: list[Kept | float | None] = []
        self._skipped: list[Kept | bool] = []
        self.num_closed = 0
        """Number of closed steps, as ``len`` but without a call."""
        self._open_loss: Losses = ()
        self._open_weight = 1.0
        self._open_norms: tuple[Kept, ...] = ()
        self.apart: LossesApart[Losses] = LossesApart(lambda one, other: one + other)
        """The separate losses of a script that has several."""
        self.measures = True
        """Whether backward passes add to the open step; False while an optimizer re-evaluates its closure."""
        self.clock = StepClock()
        self.reports = Reports()
        """Reports of the latest numbers while the script runs."""

    def __len__(self) -> int:
        return self.num_closed

    def loss(self, loss: Tensor, *, reached: Owners | None = None) -> None:
        """Add a backward pass's loss to the open step: micro-batches and several losses add up.

        Args:
            loss: one value, or several to be summed.
            reached: the optimizers whose parameters the pass reaches, if known.
        """
        if not self.measures:
            return
        value = loss.detach()
        kept = (self._keep(value.sum() if value.dim() else value),)
        self._open_loss += kept
        self.apart.add(kept, reached=reached)

    @property
    def has_any_loss(self) -> bool:
        """Whether any step, including the open one, has a loss yet."""
        return bool(self._loss or self._open_loss)

    def forget(self) -> None:
        """Discard the open step's losses: they are evaluated again."""
        self._open_loss = ()
        self.apart.forget()

    def weigh(self, factor: float) -> None:
        """Multiply the open step's losses, which were divided for more micro-batches than the step turned out to have."""
        self._open_weight *= factor

    def norm(self, norm: Tensor) -> None:
        """Add the gradient norm of one optimizer's update to the open step."""
        self._open_norms += (self._keep(norm.detach() if norm.requires_grad else norm),)  # as after create_graph

    def updated(self) -> None:
        """Record the time of an update; the last one before the step closes counts."""
        self.clock.mark()

    def close(self, *, skipped: bool | Tensor, scale: float | Tensor | None, made_by: Owners = frozenset()) -> None:
        """Close the open step.

        Args:
            skipped: whether its update was skipped; a tensor is above 0 if so.
            scale: the loss scale after it, None if there is none.
            made_by: the optimizers that made its update, by number.
        """
        self._loss.append(self._open_loss)
        self._weight.append(self._open_weight)
        self._norm.append(self._open_norms)
        self._skipped.append(self._keep(skipped) if isinstance(skipped, Tensor) else skipped)
        self._scale.append(self._keep(scale) if isinstance(scale, Tensor) else scale)
        ended_s = self.clock.close()
        self.num_closed += 1
        self.apart.close(self.num_closed, made_by=made_by)
        self._open_loss, self._open_norms, self._open_weight = (), (), 1.0
        if ended_s >= self.reports.due_s:
            self._send(ended_s)

    def turn(self, loss: Tensor, *, made_by: Owners) -> None:
        """Close a step that has no skip and no scale, and add the next one's first loss, as ``close`` and ``loss`` do.

        Most steps of a run end and begin like this, and each nested call would cost about 0.5 us per step.

        Args:
            loss: one value.
            made_by: the optimizers that made the closed step's update, by number.
        """
        self._loss.append(self._open_loss)
        self._weight.append(self._open_weight)
        self._norm.append(self._open_norms)
        self._skipped.append(False)
        self._scale.append(None)
        ended_s = self.clock.close()
        self.num_closed += 1
        if ended_s >= self.reports.due_s:
            self._send(ended_s)
        value = loss.detach()
        numbers = self._numbers.get(value.device)
        kept = ((self._keep if numbers is None else numbers.keep)(value.sum() if value.dim() else value),)
        self.apart.turn(kept, self.num_closed, made_by=made_by)
        self._open_loss, self._open_norms, self._open_weight = kept, (), 1.0

    def _send(self, ended_s: float) -> None:
        losses = [kept.where.on_host(kept.number) for kept in self._loss[-1]]
        known = [loss for loss in losses if loss is not None]
        loss = self._weight[-1] * sum(known) if losses and len(known) == len(losses) else None
        self.reports.send(ended_s, loss=loss, skipped=self._skipped)

    def finite_flags(self) -> Tensor:
        """Return, on their device, whether the last closed step's loss and gradient norm are finite; unknown ones count as finite."""
        losses, norms = self._loss[-1], self._norm[-1]
        device = (losses or norms)[0].where.row(0).device if losses or norms else None
        return torch.stack([_all_finite(losses, device), _all_finite(norms, device)])

    def last_skipped(self) -> bool:
        """Return whether the last closed step's update was skipped; waits for the device if only the device knows."""
        last = self._skipped[-1]
        return bool(last.where.row(last.number)) if isinstance(last, Kept) else last

    def steps(self, names: Mapping[int, str] | None = None) -> Steps:
        """Return all closed steps; waits for the device once.

        Args:
            names: names of what the optimizers train, by optimizer number, if known.
        """
        time_ms = self.clock.time_ms()
        read = {id(numbers): numbers.read() for numbers in self._numbers.values()}
        weights = self._weight

        def number(kept: Kept) -> float:
            return read[id(kept.where)][kept.number]

        def total(losses: Losses, step: int) -> float:
            return weights[step] * sum(map(number, losses)) if losses else math.nan

        apart = self.apart.columns(names or {}).items()
        return Steps(
            loss=[total(losses, step) for step, losses in enumerate(self._loss)],
            losses=[
                Loss(name=name, steps=c.steps, values=[sum(map(number, v)) for v in c.values]) for name, c in apart
            ],
            loss_scale=known_scales([number(s) if isinstance(s, Kept) else s for s in self._scale]),
            skipped=[number(s) > 0 if isinstance(s, Kept) else s for s in self._skipped],
            grad_norm=[_together([number(norm) for norm in norms]) for norms in self._norm],
            time_ms=list(time_ms),
            cpu_ms=list(self.clock.cpu_ms),
        )

    def _keep(self, value: Tensor) -> Kept:
        device = value.device
        numbers = self._numbers.get(device)
        if numbers is None:
            numbers = self._numbers[device] = Numbers(device)
        return numbers.keep(value)


def _all_finite(values: Sequence[Kept], device: torch.device | None) -> Tensor:
    flags = [kept.where.row(kept.number).isfinite().to(device) for kept in values]
    return torch.stack(flags).all() if flags else torch.tensor(True, device=device)


def _together(norms: Sequence[float]) -> float:
    """Return the norm of all parts together, from their norms."""
    return math.sqrt(sum(norm * norm for norm in norms)) if norms else math.nan
