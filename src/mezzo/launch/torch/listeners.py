"""Who is notified of what a run does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mezzo.observe.observer import Observer


class Listeners:
    """The observer of a run, and everything else that is notified of its passes and updates."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self.observer: Observer | None = None
        self._build: Callable[[], Observer] | None = None

    def observe(self, build: Callable[[], Observer]) -> None:
        """Notify an observer from now on; ``build`` returns a new one, here and after the steps so far were discarded."""
        self._build = build
        self.observer = build()
        self.all.append(self.observer)
        self.observer.start()

    def restart(self) -> None:
        """Discard the steps so far: they did not belong to the training."""
        if self.observer is not None and self._build is not None:
            self.observer.close()
            self.all.remove(self.observer)
            self.observe(self._build)
        for listener in self.all:
            listener.steps_discarded()
