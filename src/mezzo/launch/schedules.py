"""Hold a learning rate schedule where an update was skipped.

A scheduler waits when the one update since its last step was skipped: that holds a schedule stepped every update, and never
one stepped every epoch. Imports no framework: schedulers of all of them have a ``step``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from mezzo.launch.patches import Patches


class ScriptSchedules:
    """The schedulers of a script, and which of them are to wait."""

    def __init__(
        self, updates_of: Callable[[Any], tuple[int, int]], *, hear: Callable[[Any], None] = lambda _: None
    ) -> None:
        """Begin.

        Args:
            updates_of: returns how many updates a scheduler's optimizer has made, skipped ones included, and how many were skipped.
            hear: told of every scheduler that the script steps.
        """
        self._updates_of, self._hear = updates_of, hear
        self._seen: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
        """What ``updates_of`` returned at a scheduler's last step."""
        self._stepping = False

    def begin(self, scheduler: Any) -> None:
        """Count a scheduler's updates from now on."""
        self._seen[scheduler] = self._updates_of(scheduler)

    def waits(self, scheduler: Any) -> bool:
        """Return whether the one update since this was asked last for ``scheduler`` was skipped."""
        now, then = self._updates_of(scheduler), self._seen.get(scheduler)
        self._seen[scheduler] = now
        return then is not None and (now[0] - then[0], now[1] - then[1]) == (1, 1)

    def install(self, patches: Patches, base: type[Any]) -> None:
        """Let every scheduler of ``base`` and the classes derived from it wait, until ``patches`` are undone."""
        for kind in dict.fromkeys(classes(base)):
            if "step" in vars(kind):
                patches.wrap(kind, "step", self._held)
            if "__init__" in vars(kind):
                patches.wrap(kind, "__init__", self._constructed)

    def _constructed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Let a scheduler step while it is made: that sets the first learning rate."""

        @functools.wraps(original)
        def init(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            before, self._stepping = self._stepping, True
            try:
                original(scheduler, *args, **kwargs)
            finally:
                self._stepping = before
            self.begin(scheduler)

        return init

    def _held(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if self._stepping:  # a chain of schedulers steps its parts, a warm-up the schedule inside it
                return original(scheduler, *args, **kwargs)
            self._hear(scheduler)
            if self.waits(scheduler):
                return None
            self._stepping = True
            try:
                return original(scheduler, *args, **kwargs)
            finally:
                self._stepping = False

        return step


def classes(base: type[Any]) -> Iterator[type[Any]]:
    """Yield ``base`` and all classes derived from it."""
    yield base
    derived: list[type[Any]] = base.__subclasses__()
    for kind in derived:
        yield from classes(kind)
