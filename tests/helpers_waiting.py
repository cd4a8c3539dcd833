"""Wait in tests for what happens, not for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

LONGEST_S = 120.0
"""For what takes a second, on a machine that has other work."""


def until(condition: Callable[[], Any], what: str = "it") -> Any:
    """Wait until ``condition`` holds; return what it returns."""
    end = time.monotonic() + LONGEST_S
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.01)
    pytest.fail(f"waited {LONGEST_S:g} s for {what}")
