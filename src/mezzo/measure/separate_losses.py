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
