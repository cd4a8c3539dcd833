"""Replace attributes of other people's modules, and put every one of them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Patches:
    """Remember what was replaced; ``undo`` restores it in reverse order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Set ``owner.name`` to ``new`` until ``undo``."""
        own = name in vars(owner)
        old = getattr(owner, name)
        setattr(owner, name, new)
        self._undo.append(lambda: setattr(owner, name, old) if own else delattr(owner, name))

    def wrap(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Set ``owner.name`` to ``make(owner.name)`` until ``undo``."""
        self.replace(owner, name, make(getattr(owner, name)))

    def on_undo(self, action: Callable[[], None]) -> None:
        """Run ``action`` at ``undo``."""
        self._undo.append(action)

    def undo(self) -> None:
        """Put everything back, the last replacement first."""
        while self._undo:
            self._undo.pop()()
