"""``mezzo.compare_point``: a value of the script's own that ``mezzo diff`` compares. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_LISTENERS: list[Callable[[str, Any], None]] = []


def compare_point(name: str, values: Any) -> None:
    """Name a value for ``mezzo diff``; without it, do nothing.

    Two values of one run with one name are compared with each other, such as the log-probabilities of training and of generation.

    Args:
        name: the value's name.
        values: a tensor of any shape and floating-point format. It is not changed.
    """
    for listener in _LISTENERS:
        listener(name, values)


def listen(listener: Callable[[str, Any], None]) -> Callable[[], None]:
    """Call ``listener`` with every named value; return a function that ends this."""
    _LISTENERS.append(listener)
    return lambda: _LISTENERS.remove(listener)
