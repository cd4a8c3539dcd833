"""Record every training step of a framework that is not torch. Imports no framework.

Losses and norms are kept as given, as numbers or as a framework's scalars on its device, and read once at the end.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, SupportsFloat, TypeVar

from mezzo.measure.live import Reports
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


# A loss belongs to the optimizers that step after its backward pass. If several backward passes precede an update by several
# optimizers, each pass belongs to the optimizers whose parameters it reaches. Losses are separated only if they alternate. Models
# trained one after the other have one loss, and so do optimizers that step at different rates after the same passes.

Owners = frozenset[int]
"""Optimizers, by number."""
V = TypeVar("V")
"""The type of a loss while a script runs: a tensor on its device, or a framework's scalars."""


_MOST_PARTS = 3
"""The most names of one loss from which its title is made."""


class SeparateLosses(Generic[V]):
    """Losses by the optimizers to which they belong."""

    def __init__(self, plus: Callable[[V, V], V]) -> None:
        """Create an empty record; ``plus`` adds two losses."""
        self._plus = plus
        self._open: list[tuple[V, Owners | None, str]] = []
        """The arguments of ``add`` for each loss of the open step."""
        self._columns: dict[Owners, Column[V]] = {}
        self.needs_reach = False
        """Whether several optimizers made an update after several backward passes."""

    def add(self, value: V, *, reached: Owners | None = None, name: str = "") -> None:
        """Add the loss of a backward pass to the open step.

        Args:
            value: the loss.
            reached: the optimizers whose parameters the pass reaches, if known.
            name: the script's name for the loss, if known.
        """
        self._open.append((value, reached, name))

    def choose(self, positions: Sequence[int]) -> None:
        """Keep only those losses of the open step that are at ``positions``, counted from 0."""
        self._open = [self._open[position] for position in positions]

    def close(self, step: int, *, made_by: Owners) -> None:
        """Close step number ``step``, counted from 1; ``made_by``: the optimizers that made its update."""
        several = len(made_by) > 1 and len(self._open) > 1
        self.needs_reach |= several
        for value, reached, name in self._open:
            if not several:
                self._put(made_by, step, value, name)
            elif reached is not None:  # a pass of unknown reach belongs to no optimizer
                self._put(reached & made_by or made_by, step, value, name)
        self._open = []

    def advance(self, values: Sequence[V], step: int, *, made_by: Owners) -> None:
        """Do what ``close`` and then ``add`` do, for each of ``values`` in turn; the open step is number ``step``."""
        column = self._columns.get(made_by)
        if len(self._open) == 1 and column is not None and self._open[0][1] is None:
            column.steps.extend(range(step, step + len(values)))
            column.values.extend([self._open[0][0], *values[:-1]])
            self._open = [(values[-1], None, "")]
            return
        self.close(step, made_by=made_by)
        self.add(values[0])
        if len(values) > 1:
            self.advance(values[1:], step + 1, made_by=made_by)

    def _put(self, owners: Owners, step: int, value: V, name: str) -> None:
        column = self._columns.setdefault(owners, Column())
        column.names.setdefault(name)
        if column.steps[-1:] == [step]:
            column.values[-1] = self._plus(column.values[-1], value)
        else:
            column.steps.append(step)
            column.values.append(value)

    def columns(self, names: Mapping[int, str]) -> dict[str, Column[V]]:
        """Return every loss by its name; empty if there is only one.

        Args:
            names: names of optimizers by number, as far as known.
        """
        known = self._merged()
        if not _alternate([*known.values()]):
            return {}
        exclusive = [owners.difference(*(other for other in known if other < owners)) or owners for owners in known]
        parts_of_each = [[names.get(number, "") for number in sorted(owners)] for owners in exclusive]
        in_script = [[*c.names] if len(c.names) <= _MOST_PARTS else [] for c in known.values()]
        numbered = [[f"loss {number}"] for number in range(1, len(known) + 1)]
        titles = next(found for parts in (parts_of_each, in_script, numbered) if (found := _titles(parts)))
        return dict(zip(titles, known.values(), strict=True))

    def _merged(self) -> dict[Owners, Column[V]]:
        """Return the columns in the order of their first steps.

        A column whose optimizers sometimes step together with others is merged into the column of the larger group.
        """
        merged: dict[Owners, Column[V]] = {}
        for owners, column in sorted(self._columns.items(), key=lambda item: -len(item[0])):
            larger = next((o for o, c in merged.items() if owners < o and not set(c.steps) & set(column.steps)), None)
            if larger is None:
                merged[owners] = column
            else:
                merged[larger] = merged[larger].merged_with(column)
        return dict(sorted(merged.items(), key=lambda item: item[1].steps[0]))


@dataclass(frozen=True)
class Column(Generic[V]):
    """The values of one loss, and the step of each."""

    steps: list[int] = field(default_factory=list)
    values: list[V] = field(default_factory=list)
    names: dict[str, None] = field(default_factory=dict)
    """The script's names for its passes' losses, in order; empty text for one without a name."""

    def merged_with(self, other: Column[V]) -> Column[V]:
        """Return both columns as one, in the order of their steps."""
        pairs = [*zip(self.steps, self.values, strict=True), *zip(other.steps, other.values, strict=True)]
        pairs.sort(key=lambda pair: pair[0])
        return Column([step for step, _ in pairs], [value for _, value in pairs], self.names | other.names)


def _titles(parts_of_each: Sequence[Sequence[str]]) -> list[str]:
    """Return a title for each loss, joined from its parts; empty if a part has no name or two losses have the same."""
    titles = [" + ".join(parts) for parts in parts_of_each]
    named = all(parts and all(parts) for parts in parts_of_each)
    return titles if named and len(set(titles)) == len(titles) else []


def _alternate(columns: Sequence[Column[V]]) -> bool:
    """Return whether the steps of two columns overlap."""
    ends = sorted((column.steps[0], column.steps[-1]) for column in columns)
    return any(second[0] <= first[1] for first, second in pairwise(ends))
