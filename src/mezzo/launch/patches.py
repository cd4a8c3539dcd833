"""Replace attributes of other packages, and restore every one of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Patches:
    """A list of replaced attributes; ``undo`` restores them in reverse order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Set ``owner.name`` to ``new`` until ``undo``."""
        defined = name in vars(owner)
        old = vars(owner)[name] if defined else getattr(owner, name)
        setattr(owner, name, new)
        # Some of torch's settings are computed attributes: setting them does not put them into the owner's ``__dict__``.
        inherited = not defined and name in vars(owner)
        self._undo.append(lambda: delattr(owner, name) if inherited else setattr(owner, name, old))

    def wrap(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Set ``owner.name`` to ``make(owner.name)`` until ``undo``."""
        self.replace(owner, name, make(getattr(owner, name)))

    def around(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        """Make ``owner.name`` run ``call(original, ...)`` with its arguments until ``undo``.

        For functions that run often use ``wrap``, which costs one Python call less.
        """
        original = getattr(owner, name)

        @functools.wraps(original)
        def called(*args: Any, **kwargs: Any) -> Any:
            return call(original, *args, **kwargs)

        self.replace(owner, name, called)

    def on_undo(self, action: Callable[[], Any]) -> None:
        """Run ``action`` at ``undo``."""
        self._undo.append(action)

    def undo(self) -> None:
        """Restore everything, the last replacement first."""
        while self._undo:
            self._undo.pop()()
