"""Decisions that the processes of a training run make together, at the same update: to save a snapshot, to end, to stop at an alarm.

If one process saved, ended or rewound on its own, the others would wait in their next reduction. So all processes exchange a few numbers at
the same updates, about once a second; the first process measures how many updates that is. No other update communicates, except under
a diagnosis, which may end at any step and so exchanges after each. The numbers are sent over gloo in a separate group, which leaves the
training's reductions and streams alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
EXCHANGE_EVERY_S = 1.0
"""Approximate interval between exchanges: after that time all processes know of an alarm or of a request to end."""
_MOST_UPDATES = 10_000
"""Most updates between two exchanges: processes whose steps become slow still exchange within hours."""


class Agreement:
    """The exchanges of one process with the others."""

    def __init__(self, *, every_s: float = EXCHANGE_EVERY_S, within: Any = None) -> None:
        """Create the exchanges; the first comes at update 1.

        Args:
            every_s: the approximate interval between exchanges.
            within: the process group; None for all processes.
        """
        self._every_s, self._within = every_s, within
        self._group: Any = None
        self._world: Any = None
        """The group of all processes when the own group was created: a script may destroy it and form another."""
        self._interval = 1
        self._last = (0, time.monotonic())
        self.next = 1
        """The number of updates at which all processes exchange again."""

    def wait_until(self, step: int) -> None:
        """Exchange nothing before this step."""
        self.next = step

    def restart(self) -> None:
        """Exchange at the next update; the count of updates restarts."""
        self.next, self._interval = 1, 1

    def exchange(self, updates: int, requests: Sequence[int]) -> list[int]:
        """Return the largest of each number over all processes; call it after ``next`` updates.

        Args:
            updates: the number of updates so far, the same in all processes.
            requests: numbers of 0 or more, the same count in each process.
        """
        first = dist.get_rank(self._own_group()) == 0
        self._interval, *largest = self.largest([self._next_interval(updates) if first else 0, *requests])
        self.next, self._last = updates + self._interval, (updates, time.monotonic())
        return largest

    def all_equal(self, numbers: Sequence[int]) -> bool:
        """Return whether all processes passed the same numbers."""
        largest = self.largest([*numbers, *(-number for number in numbers)])
        return all(most == -least for most, least in zip(largest, largest[len(numbers) :], strict=False))

    def in_all(self, here: bool) -> bool:
        """Return whether ``here`` is true in all processes."""
        return not self.largest([not here])[0]

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest of each number over all processes."""
        reduced = torch.tensor([int(number) for number in numbers], dtype=torch.int64)
        dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=self._own_group())
        return [int(number) for number in reduced]

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return dist.get_rank(self._own_group())

    @property
    def size(self) -> int:
        """The number of processes."""
        return dist.get_world_size(self._own_group())

    def of_each(self, value: T) -> list[T]:
        """Return the values of all processes, by rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._own_group())
        return values

    def first_of(self, value: T | None) -> tuple[int, T] | None:
        """Return the lowest rank that passed a value, and the value; None if no process did."""
        return next(((rank, one) for rank, one in enumerate(self.of_each(value)) if one is not None), None)

    def any_of(self, updates: int, value: T | None) -> tuple[int, T] | None:
        """Exchange like ``exchange``, and return the result of ``first_of``."""
        return self.first_of(value) if any(self.exchange(updates, [value is not None])) else None

    def _next_interval(self, updates: int) -> int:
        """Return the number of updates until the next exchange, by this process's clock; at most twice as many as before."""
        before, at_s = self._last
        per_update_s = (time.monotonic() - at_s) / max(updates - before, 1)
        return max(1, min(int(self._every_s / max(per_update_s, 1e-6)), 2 * self._interval, _MOST_UPDATES))

    def _own_group(self) -> Any:
        if self._group is None or (self._within is None and self._world is not dist.group.WORLD):
            self._world = dist.group.WORLD
            ranks = None if self._within is None else dist.get_process_group_ranks(self._within)
            # With only some of the processes, the others take no part in creating the group.
            self._group = dist.new_group(
                ranks, backend="gloo", timeout=_timeout(), use_local_synchronization=ranks is not None
            )
        return self._group


def _timeout() -> timedelta | None:
    """Return the timeout of the script's own process group; None for torch's default."""
    whole: Any = dist.group.WORLD
    for device in whole._device_types:
        options = getattr(whole._get_backend(device), "options", None)
        if isinstance(found := getattr(options, "_timeout", None), timedelta):
            return found
    return None


def are_several() -> bool:
    """Return whether this process belongs to a group of several."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def save_is_due(
    agreement: Agreement | None, updates: int, *, due: bool, is_writing: bool, asked: bool
) -> tuple[bool, bool]:
    """Return whether to save now, and whether a process was asked to end; several processes agree on both.

    Args:
        agreement: the exchanges with the other processes; None if there are none.
        updates: the number of updates so far, the same in all processes.
        due: whether enough time has passed.
        is_writing: whether the last save is still being written.
        asked: whether this process was asked to end.
    """
    if agreement is not None:
        if updates < agreement.next:
            return False, asked
        due, is_writing, asked = map(bool, agreement.exchange(updates, [due, is_writing, asked]))
    return asked or (due and not is_writing), asked
