"""Record every training step: loss, loss scale, skipped or not, gradient norm, time.

Losses, norms, scales and flags stay on their device and are read once at the end: reading them in every step would make it wait for the
device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mezzo.engine.guardrails.alarms import UpdateNumbers
from mezzo.measure.apart import LossesApart, Owners
from mezzo.measure.live import Reports
from mezzo.measure.numbers import CHUNK, Kept, Numbers
from mezzo.measure.plain_steps import known_scales
from mezzo.measure.step_clock import Mark, StepClock
from mezzo.records import Loss, Steps

Losses = tuple[Kept, ...]
"""Losses whose sum is the step's loss."""
NORMS_APART = 32
"""Steps between gradient norms, where only some are measured."""


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
        """Number of closed steps; a plain value, because hooks read it in every step."""
        self._open_loss: Losses = ()
        self._open_weight = 1.0
        self._open_norms: tuple[Kept, ...] = ()
        self._turned: list[tuple[Mark, int]] = []
        """Of each step that is not in the columns yet: its end, and the place of its successor's loss in the open chunk."""
        self._turns_on: Numbers | None = None
        self._made_by: Owners = frozenset()
        self._turns_scale: float | None = None
        self._turns_also = 0
        """Numbers that ``turn`` keeps of a step beside its loss."""
        self.apart: LossesApart[Losses] = LossesApart(lambda one, other: one + other)
        """The separate losses of a script that has several."""
        self.measures = True
        """Whether backward passes add to the open step; False while an optimizer re-evaluates its closure."""
        self.clock = StepClock()
        self.reports = Reports()
        """Reports of the latest numbers while the script runs."""

    def anew(self) -> StepRecorder:
        """Return an empty recorder to replace this one, with its reports and device."""
        other = StepRecorder()
        other.reports = self.reports
        other.clock.device = self.clock.device
        return other

    def loss(self, loss: Tensor, *, reached: Owners | None = None) -> None:
        """Add a backward pass's loss to the open step: micro-batches and several losses add up.

        Args:
            loss: one value, or several to be summed.
            reached: the optimizers whose parameters the pass reaches, if known.
        """
        if not self.measures:
            return
        self.settle()
        value = loss.detach()
        kept = (self._keep(value.sum() if value.dim() else value),)
        self._open_loss += kept
        self.apart.add(kept, reached=reached)

    @property
    def has_any_loss(self) -> bool:
        """Whether any step, including the open one, has a loss yet."""
        return bool(self._loss or self._open_loss)

    def forget(self) -> None:
        """Discard the open step's losses, because they will be evaluated again."""
        self.settle()
        self._open_loss = ()
        self.apart.forget()

    def weigh(self, factor: float) -> None:
        """Multiply the open step's losses, which were divided by more micro-batches than the step turned out to have."""
        self.settle()
        self._open_weight *= factor

    def norm(self, norm: Tensor) -> None:
        """Add the gradient norm of one optimizer's update to the open step."""
        self.settle()
        self._open_norms += (self._keep(norm.detach() if norm.requires_grad else norm),)  # as after create_graph

    @property
    def has_norm(self) -> bool:
        """Whether the open step has a gradient norm yet."""
        self.settle()
        return bool(self._open_norms)

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
        self.settle()
        ended = self.clock.take()
        self._loss.append(self._open_loss)
        self._weight.append(self._open_weight)
        self._norm.append(self._open_norms)
        self._skipped.append(self._keep(skipped) if isinstance(skipped, Tensor) else skipped)
        self._scale.append(self._keep(scale) if isinstance(scale, Tensor) else scale)
        self.clock.add(ended)
        self._open_loss, self._open_norms, self._open_weight = (), (), 1.0
        self.num_closed += 1
        self.apart.close(self.num_closed, made_by=made_by)
        if ended[0] >= self.reports.due_s:
            self._send(ended[0])

    def begin_turns(self, made_by: Owners, *, scale: float | None = None, also: int = 0) -> None:
        """Let ``turn`` record the following steps in the buffer of the last loss.

        Args:
            made_by: the optimizers that make their updates.
            scale: the loss scale after each; None if there is none, or only the device knows it.
            also: how many tensors ``turn`` gets beside each loss: 1 for the loss scale, 2 for a flag and the loss scale.
        """
        self.settle()
        self._made_by, self._turns_scale, self._turns_also = made_by, scale, also
        self._turns_on = self._loss[-1][-1].where if self._loss and self._loss[-1] else None

    def turn(self, loss: Any, also: tuple[Any, ...] = ()) -> bool:
        """Close a step that was not skipped and left the scale, and add the next one's first loss, as ``close`` and ``loss`` do.

        ``also`` are numbers of the step that is closed, as ``begin_turns`` was told: a flag above 0 if it was skipped, and its scale.

        Return False, and do nothing, unless ``loss`` is a scalar on the device of the losses before. Most steps of a run end and
        begin like this. By then a model's arithmetic has evicted our objects from the CPU's caches, so each object touched costs
        about 0.1 us and each nested call about 2 us: only the time and the loss are stored, and ``settle`` sorts them into the columns.
        """
        numbers = self._turns_on
        if numbers is None or type(loss) is not Tensor or loss.dim():
            return False
        clock, place, cells = self.clock, numbers.place, numbers.cells
        if not (loss.is_cpu if cells is not None else loss.device == numbers.device):
            return False
        if also or self._turns_also:
            if len(also) != self._turns_also or also[-1].device != numbers.device:
                return False
            if place + len(also) >= CHUNK:
                place = CHUNK  # a step's numbers are neighbours
        if place == CHUNK:
            self.settle()
            numbers.grow()
            place, cells = 0, numbers.cells
        for value in also:
            if cells is None:
                numbers.views[place].copy_(value)
            else:
                cells[place] = value.item()
            place += 1
        if cells is None:
            numbers.views[place].copy_(loss.detach())
        else:
            cells[place] = loss.item().real  # item() gives a complex number for a complex loss
        numbers.place = place + 1
        ended = clock.ended or clock.take()
        clock.ended = None
        self._turned.append((ended, place))
        self.num_closed += 1
        if ended[0] >= self.reports.due_s:
            self.settle()
            self._send(ended[0])
        return True

    def settle(self) -> None:
        """Put the steps that ``turn`` has closed into the columns."""
        if not self._turned:
            return
        turned, self._turned = self._turned, []
        where, new = self._turns_on, tuple.__new__  # not Kept(...), a call of Python for each
        assert where is not None
        first = where.first  # whatever adds a chunk settles before
        kept: list[Losses] = [(new(Kept, (where, first + place)),) for _, place in turned]
        others, also = len(turned) - 1, self._turns_also
        self.apart.turns(kept, len(self._loss) + 1, made_by=self._made_by)
        self._loss += [self._open_loss, *kept[:-1]]
        self._weight += [self._open_weight] + [1.0] * others
        self._norm += [self._open_norms] + [()] * others  # a norm settles before it is added
        if also < 2:
            self._skipped += [False] * len(turned)
        else:
            self._skipped += [new(Kept, (where, first + place - 2)) for _, place in turned]
        if also < 1:
            self._scale += [self._turns_scale] * len(turned)
        else:
            self._scale += [new(Kept, (where, first + place - 1)) for _, place in turned]
        self.clock.add(*[ended for ended, _ in turned])
        self._open_loss, self._open_norms, self._open_weight = kept[-1], (), 1.0

    def _send(self, ended_s: float) -> None:
        losses = [kept.where.on_host(kept.number) for kept in self._loss[-1]]
        known = [loss for loss in losses if loss is not None]
        loss = self._weight[-1] * sum(known) if losses and len(known) == len(losses) else None
        scale = self._scale[-1]
        loss_scale = scale.where.on_host(scale.number) if isinstance(scale, Kept) else scale
        measured = next((norms for norms in reversed(self._norm[-NORMS_APART:]) if norms), ())
        norms = [kept.where.on_host(kept.number) for kept in measured]
        read = [norm for norm in norms if norm is not None]
        grad_norm = _together(read) if read and len(read) == len(norms) else None
        self.reports.send(ended_s, loss=loss, skipped=self._skipped, loss_scale=loss_scale, grad_norm=grad_norm)

    def finite_flags(self) -> Tensor:
        """Return, on their device, whether the last closed step's loss and gradient norm are finite; unknown ones count as finite."""
        self.settle()
        losses, norms = self._loss[-1], self._norm[-1]
        device = (losses or norms)[0].where.row(0).device if losses or norms else None
        return torch.stack([_all_finite(losses, device), _all_finite(norms, device)])

    def last_skipped(self) -> bool:
        """Return whether the last closed step's update was skipped; waits for the device if only the device knows."""
        self.settle()
        last = self._skipped[-1]
        return bool(last.where.row(last.number)) if isinstance(last, Kept) else last

    def send_numbers(self) -> None:
        """Copy the numbers on devices to the host without waiting; ``seen_from`` returns them once they have arrived."""
        for numbers in self._numbers.values():
            numbers.send()

    def seen_from(self, first: int) -> list[UpdateNumbers]:
        """Return the closed steps from number ``first`` (from 0) up to the first whose numbers have not reached the host yet."""
        self.settle()
        seen: list[UpdateNumbers] = []
        new = tuple.__new__  # not UpdateNumbers(...), a call of Python
        columns = (self._loss, self._norm, self._skipped, self._scale, self._weight)
        for step, row in enumerate(zip(*[column[first:] for column in columns], strict=True), start=first + 1):
            losses, norms, skipped, scale, weight = row
            if skipped is False and not norms and len(losses) == 1 and not isinstance(scale, Kept):
                where, number = losses[0]
                loss = where.on_host(number)
                if loss is None:
                    return seen
                seen.append(new(UpdateNumbers, (step, weight * loss, None, False, scale)))
                continue  # most steps: what the rest would return
            kept = losses + norms
            if isinstance(skipped, Kept):
                kept += (skipped,)
            if isinstance(scale, Kept):
                kept += (scale,)
            values: list[float] = []  # filled in a loop: until Python 3.12 a comprehension is a call
            for where, number in kept:
                value = where.on_host(number)
                if value is None:
                    return seen
                values.append(value)
            if isinstance(scale, Kept):
                scale = values.pop()
            if isinstance(skipped, Kept):
                skipped = values.pop() > 0
            loss = weight * sum(values[: len(losses)]) if losses else None
            norm = _together(values[len(losses) :]) if norms else None
            seen.append(new(UpdateNumbers, (step, loss, norm, skipped, scale)))
        return seen

    def steps(self, names: Mapping[int, str] | None = None) -> Steps:
        """Return all closed steps; waits for the device once.

        Args:
            names: names of what the optimizers train, by optimizer number, if known.
        """
        self.settle()
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
            cpu_ms=self.clock.cpu_ms(),
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
