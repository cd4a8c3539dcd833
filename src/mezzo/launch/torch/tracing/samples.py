"""Follow which samples a DataLoader drew for the batch that it delivered last, by their indices in the data set."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data.dataloader import _BaseDataLoaderIter

from mezzo.launch.patches import Patches
from mezzo.launch.torch.tracing.digests import text_digest


class DrawnSamples:
    """The samples of the last batch."""

    def __init__(self) -> None:
        self._drawn: WeakKeyDictionary[Any, deque[str]] = WeakKeyDictionary()
        """Digests of drawn indices whose batches are not delivered yet: workers draw ahead."""
        self._delivered: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._last = ("", 0)

    def install(self, patches: Patches) -> None:
        """Follow all loaders until ``patches`` are undone."""
        patches.around(_BaseDataLoaderIter, "_next_index", self._draw)
        patches.around(_BaseDataLoaderIter, "__next__", self._deliver)

    def take(self) -> tuple[str, int]:
        """Return the batch delivered since the last call: its digest, and its number in its pass; empty and 0 without one."""
        last, self._last = self._last, ("", 0)
        return last

    def _draw(self, original: Callable[..., Any], iterator: Any) -> Any:
        indices = original(iterator)
        known = isinstance(indices, int) or (isinstance(indices, list) and None not in indices)
        self._drawn.setdefault(iterator, deque()).append(text_digest(indices) if known else "")
        return indices

    def _deliver(self, original: Callable[..., Any], iterator: Any) -> Any:
        batch = original(iterator)
        drawn = self._drawn.get(iterator)
        self._delivered[iterator] = number = self._delivered.get(iterator, 0) + 1
        self._last = drawn.popleft() if drawn else "", number
        return batch
