"""Replaced attributes: what runs in their place, and that every one of them comes back."""

from __future__ import annotations

import inspect
import types
from typing import Any

from mezzo.launch.patches import Patches


class Counter:
    """What is patched."""

    def add(self, number: int, *, times: int = 1) -> int:
        """Return a product."""
        return number * times


def test_around_runs_in_place_of_the_original_with_its_arguments() -> None:
    patches, module, original = Patches(), types.SimpleNamespace(double=lambda number: 2 * number), Counter.add

    def one_more(original: Any, /, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) + 1

    patches.around(Counter, "add", one_more)
    patches.around(module, "double", one_more)
    assert (Counter().add(3), Counter().add(number=3, times=5), module.double(4)) == (4, 16, 9)
    assert Counter.add.__doc__ == "Return a product."
    assert [*inspect.signature(Counter.add).parameters] == ["self", "number", "times"]
    patches.undo()
    assert Counter.add is original
    assert module.double(4) == 8


def test_the_last_replacement_is_undone_first() -> None:
    patches, module = Patches(), types.SimpleNamespace(value=1)
    patches.replace(module, "value", 2)
    patches.wrap(module, "value", lambda value: value + 1)
    seen: list[int] = []
    patches.on_undo(lambda: seen.append(module.value))
    patches.undo()
    assert (seen, module.value) == ([3], 1)
