"""Leave out the step of a learning rate schedule after a skipped update.

A scheduler's step is left out if the only update since its last step was skipped. That affects schedules that step after every update,
and never one that steps after every epoch. Imports no framework: schedulers of all frameworks have a ``step``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from mezzo.launch.patches import Patches


class ScriptSchedules:
    """The schedulers of a script, whose steps are left out after skipped updates."""

    def __init__(
        self, updates_of: Callable[[Any], tuple[int, int]], *, on_step: Callable[[Any], None] = lambda _: None
    ) -> None:
        """Create an empty list of schedulers.

        Args:
            updates_of: returns how many updates a scheduler's optimizer has made, including skipped ones, and how many were skipped.
            on_step: called with every scheduler that the script steps.
        """
        self._updates_of, self._on_step = updates_of, on_step
        self._seen: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
        """The result of ``updates_of`` at a scheduler's last step."""
        self._stepping = False

    def begin(self, scheduler: Any) -> None:
        """Count a scheduler's updates from now on."""
        self._seen[scheduler] = self._updates_of(scheduler)

    def since_step(self, scheduler: Any) -> tuple[int, int] | None:
        """Return a scheduler's updates since its last step, and how many of them were skipped; None for one that is not known."""
        now, then = self._updates_of(scheduler), self._seen.get(scheduler)
        return None if then is None else (now[0] - then[0], now[1] - then[1])

    def begin_after(self, scheduler: Any, since_step: tuple[int, int]) -> None:
        """Count a scheduler's updates from now on, after those that ``since_step`` returned in the run that is resumed."""
        now = self._updates_of(scheduler)
        self._seen[scheduler] = now[0] - since_step[0], now[1] - since_step[1]

    def waits(self, scheduler: Any) -> bool:
        """Return whether the only update since the last call for ``scheduler`` was skipped."""
        since = self.since_step(scheduler)
        self.begin(scheduler)
        return since == (1, 1)

    def install(self, patches: Patches, base: type[Any]) -> None:
        """Make schedulers of ``base`` and its subclasses wait at skipped updates until ``patches`` are undone."""
        for kind in dict.fromkeys(with_subclasses(base)):
            if "step" in vars(kind):
                patches.wrap(kind, "step", self._waiting_step)
            if "__init__" in vars(kind):
                patches.around(kind, "__init__", self._construct)

    def _construct(self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> None:
        """Let a scheduler step while it is constructed: that sets the first learning rate."""
        before, self._stepping = self._stepping, True
        try:
            original(scheduler, *args, **kwargs)
        finally:
            self._stepping = before
        self.begin(scheduler)

    def _waiting_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if self._stepping:  # by an outer scheduler: a chain steps its parts, and a warm-up the schedule inside it
                return original(scheduler, *args, **kwargs)
            self._on_step(scheduler)
            if self.waits(scheduler):
                return None
            self._stepping = True
            try:
                return original(scheduler, *args, **kwargs)
            finally:
                self._stepping = False

        return step


def with_subclasses(base: type[Any]) -> Iterator[type[Any]]:
    """Yield ``base`` and all its subclasses."""
    yield base
    derived: list[type[Any]] = base.__subclasses__()
    for kind in derived:
        yield from with_subclasses(kind)
