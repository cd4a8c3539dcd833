"""Separate the losses of one script, such as those of a GAN, or of an actor and a critic.

A loss belongs to the optimizers that step after its backward pass. If several backward passes precede an update by several
optimizers, each pass belongs to those of them whose parameters it reaches. Losses are separated only if they alternate. Models
trained one after the other have one loss, and so do optimizers that step at different rates after the same passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, TypeVar

Owners = frozenset[int]
"""Optimizers, by number."""
V = TypeVar("V")
"""The type of a loss while a script runs: a tensor on its device, or a framework's scalars."""


class SeparateLosses(Generic[V]):
    """Losses by the optimizers to which they belong."""

    def __init__(self, plus: Callable[[V, V], V]) -> None:
        """Create an empty record; ``plus`` adds two losses."""
        self._plus = plus
        self._open: dict[Owners | None, V] = {}
        self._num_open = 0
        self._columns: dict[Owners, Column[V]] = {}
        self.needs_reach = False
        """Whether several optimizers made an update after several backward passes."""

    def add(self, value: V, *, reached: Owners | None = None) -> None:
        """Add the loss of a backward pass to the open step; ``reached``: the optimizers whose parameters it reaches, if known."""
        self._open[reached] = self._plus(self._open[reached], value) if reached in self._open else value
        self._num_open += 1

    def forget(self) -> None:
        """Discard the losses of the open step."""
        self._open, self._num_open = {}, 0

    def close(self, step: int, *, made_by: Owners) -> None:
        """Close step number ``step``, counted from 1; ``made_by``: the optimizers that made its update."""
        if len(made_by) < 2 or self._num_open < 2:
            for value in self._open.values():
                self._put(made_by, step, value)
        else:
            self.needs_reach = True
            for reached, value in self._open.items():
                if reached is not None:  # a pass of unknown reach belongs to no optimizer
                    self._put(reached & made_by or made_by, step, value)
        self.forget()

    def advance(self, values: Sequence[V], step: int, *, made_by: Owners) -> None:
        """Do what ``close`` and then ``add`` do, for each of ``values`` in turn; the open step is number ``step``."""
        column = self._columns.get(made_by)
        if self._num_open == 1 and column is not None and None in self._open:
            column.steps.extend(range(step, step + len(values)))
            column.values.extend([self._open[None], *values[:-1]])
            self._open[None] = values[-1]
            return
        self.close(step, made_by=made_by)
        self.add(values[0])
        if len(values) > 1:
            self.advance(values[1:], step + 1, made_by=made_by)

    def _put(self, owners: Owners, step: int, value: V) -> None:
        column = self._columns.setdefault(owners, Column())
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
        titles = [" + ".join(parts) for parts in parts_of_each]
        if len(set(titles)) < len(titles) or not all(parts and all(parts) for parts in parts_of_each):
            titles = [f"loss {number}" for number in range(1, len(known) + 1)]
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

    def merged_with(self, other: Column[V]) -> Column[V]:
        """Return both columns as one, in the order of their steps."""
        pairs = [*zip(self.steps, self.values, strict=True), *zip(other.steps, other.values, strict=True)]
        pairs.sort(key=lambda pair: pair[0])
        return Column([step for step, _ in pairs], [value for _, value in pairs])


def _alternate(columns: Sequence[Column[V]]) -> bool:
    """Return whether the steps of two columns overlap."""
    ends = sorted((column.steps[0], column.steps[-1]) for column in columns)
    return any(second[0] <= first[1] for first, second in pairwise(ends))
