"""Take down every training step: loss, loss scale, skipped or not, gradient norm, time.

Losses and norms are kept as tensors on their device and read once at the end: a read a step would make every step
wait for the device. What is kept is two numbers a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mezzo.measure.apart import LossesApart, Owners
from mezzo.measure.plainsteps import known_scales
from mezzo.records import Loss, Steps


class StepRecorder:
    """Collect what one run's steps show; a step is everything between two updates."""

    def __init__(self) -> None:
        self._loss: list[Tensor | float] = []
        self._norm: list[Tensor | float] = []
        self._scale: list[float | None] = []
        self._skipped: list[bool] = []
        self._time_ms: list[float] = []
        self._cpu_ms: list[float] = []
        self._open_loss: Tensor | None = None
        self.apart: LossesApart[Tensor] = LossesApart(_plus)
        """The losses one by one, where a script has several."""
        self._open_norms: list[Tensor] = []
        self.measures = True
        """Whether backward passes add to the open step; not while an optimizer evaluates its closure once more."""
        self._started = self._now()
        self._ended: tuple[float, float] | None = None

    def __len__(self) -> int:
        return len(self._loss)

    def loss(self, loss: Tensor, *, reached: Owners | None = None) -> None:
        """Add a backward pass's loss to the open step: micro-batches and several losses add up.

        Args:
            loss: one value, or several that are added.
            reached: the optimizers whose parameters the pass reaches, where that is known.
        """
        if not self.measures:
            return
        value = loss.detach()
        value = value.sum() if value.dim() else value.clone()  # the script may change its own in place
        self._open_loss = value if self._open_loss is None else self._open_loss + value.to(self._open_loss.device)
        self.apart.add(value, reached=reached)

    def has_loss(self) -> bool:
        """Return whether the open step has a loss yet."""
        return self._open_loss is not None

    def forget(self) -> None:
        """Forget the open step's losses: they are evaluated again."""
        self._open_loss = None
        self.apart.forget()

    def weigh(self, factor: float) -> None:
        """Multiply the open step's losses, which were divided for more micro-batches than the step turned out to have."""
        if self._open_loss is not None:
            self._open_loss = self._open_loss * factor

    def norm(self, norm: Tensor) -> None:
        """Add the gradient norm of one optimizer's update to the open step."""
        self._open_norms.append(norm.detach())  # a backward pass with create_graph gives it a graph to hold

    def updated(self) -> None:
        """Take the time of an update; the last one before the step closes counts."""
        self._ended = self._now()

    def close(self, *, skipped: bool, scale: float | None, made_by: Owners = frozenset()) -> None:
        """Close the open step.

        Args:
            skipped: whether its update was skipped.
            scale: the loss scale after it, None where there is none.
            made_by: the optimizers that made its update, by number.
        """
        ended = self._ended or self._now()
        self._loss.append(math.nan if self._open_loss is None else self._open_loss)
        self._norm.append(_together(self._open_norms))
        self._skipped.append(skipped)
        self._scale.append(scale)
        self._time_ms.append((ended[0] - self._started[0]) * 1e3)
        self._cpu_ms.append((ended[1] - self._started[1]) * 1e3)
        self.apart.close(len(self._loss), made_by=made_by)
        self._started, self._ended = ended, None
        self._open_loss, self._open_norms = None, []

    def finite_flags(self) -> Tensor:
        """Return whether the last closed step's loss and gradient norm are finite, on their device; unknown ones count as finite."""
        values = [v for v in (self._loss[-1], self._norm[-1]) if isinstance(v, Tensor)]
        device = values[0].device if values else None
        flags = [v.isfinite().to(device) if isinstance(v, Tensor) else True for v in (self._loss[-1], self._norm[-1])]
        return torch.stack([torch.as_tensor(f, device=device) for f in flags])

    def last_skipped(self) -> bool:
        """Return whether the last closed step's update was skipped."""
        return self._skipped[-1]

    def steps(self, names: Mapping[int, str] | None = None) -> Steps:
        """Return all closed steps; waits for the device once.

        Args:
            names: of what optimizers train, by their numbers, where these are known.
        """
        apart = self.apart.columns(names or {})
        return Steps(
            loss=_read(self._loss),
            losses=[Loss(name=n, steps=column.steps, values=_read(column.values)) for n, column in apart.items()],
            loss_scale=known_scales(self._scale),
            skipped=self._skipped,
            grad_norm=_read(self._norm),
            time_ms=self._time_ms,
            cpu_ms=self._cpu_ms,
        )

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()


def _plus(first: Tensor, second: Tensor) -> Tensor:
    return first + second.to(first.device)


def _together(norms: list[Tensor]) -> Tensor | float:
    if not norms:
        return math.nan
    if len(norms) == 1:
        return norms[0]
    total: Tensor = torch.linalg.vector_norm(torch.stack([n.float().to(norms[0].device) for n in norms]))
    return total


def _read(values: Sequence[Tensor | float]) -> list[float]:
    tensors = [v.float() for v in values if isinstance(v, Tensor)]
    device = tensors[0].device if tensors else None
    numbers = iter(torch.stack([t.to(device) for t in tensors]).tolist() if tensors else [])
    return [next(numbers) if isinstance(v, Tensor) else v for v in values]
