"""What tests do with a value that may be missing."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def existing(value: T | None) -> T:
    """Return a value that is there."""
    assert value is not None
    return value
