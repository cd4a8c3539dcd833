"""The position of a training run in its data: the pass over a loader, its delivered batches, and its shuffling.

The order of a pass follows from the random generators at its beginning. So these are kept: a resumed pass begins with them, skips the
batches that were delivered, and continues with the generators of the save.

Batches of a ``DataLoader`` without workers over an indexed data set are skipped by their indices, without loading them. Others are loaded
and dropped: the generators of workers, and of a data set that is a stream, must advance to the same position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from mezzo.engine.randomness import random_states, set_random_states
from mezzo.errors import SessionError


class Position:
    """Passes over the data, and the batches of the open one."""

    def __init__(self) -> None:
        self.epoch = 0
        """Number of finished passes."""
        self._batch = 0
        self._began: dict[str, Any] | None = None
        """The generators when the open pass began; None between two passes."""
        self._generators: list[torch.Generator] = []
        """The generators of the last loader and its samplers."""
        self._after: list[Any] = []
        """Their states to continue with, if the save was between two passes."""
        self._resumes: dict[str, Any] | None = None
        """The generators to continue with once the next pass has reached the position of the save."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        generators = [generator.get_state() for generator in self._generators]
        return {"epoch": self.epoch, "batch": self._batch, "began": self._began, "generators": generators}

    def load_state_dict(self, state: dict[str, Any], now: dict[str, Any]) -> None:
        """Continue from a position; ``now`` are the generators at its save."""
        self.epoch, self._batch, self._began = state["epoch"], state["batch"], state["began"]
        self._after, self._resumes = state["generators"], now

    def as_it_is(self) -> dict[str, Any]:
        """Return everything that a pass or ``load_state_dict`` changes, for ``set_back``."""
        return dict(vars(self))

    def set_back(self, state: dict[str, Any]) -> None:
        """Return to a position in the same process."""
        vars(self).update(state)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of one pass, or the rest of the pass that was open when the position was saved.

        A pass that ended with ``break`` counts as finished when the next one begins.

        Raises:
            SessionError: ``loader`` is an iterator, which cannot begin a pass again, or has fewer batches than were delivered.
        """
        if isinstance(loader, Iterator):
            raise SessionError(
                f"batches() got the iterator {type(loader).__name__}; allowed: a DataLoader, or an object that can be "
                "iterated again for each pass",
                hint="pass the loader itself, not iter(loader), zip(...) or a generator; for several loaders write a class with __iter__",
            )
        self._generators = generators_of(loader)
        resumes, self._resumes = self._resumes, None
        if resumes is not None and self._began is not None:
            iterator = self._reopened(loader, self._began)
            set_random_states(resumes)
        else:
            if resumes is not None:
                self._set_generators(self._after)
                set_random_states(resumes)
            self.epoch, self._batch = self.epoch + (self._began is not None), 0
            self._began = {**random_states(), "generators": [generator.get_state() for generator in self._generators]}
            iterator = iter(loader)
        for batch in iterator:
            self._batch += 1
            yield batch
        self.epoch, self._batch, self._began = self.epoch + 1, 0, None

    def _set_generators(self, states: list[Any]) -> None:
        if states and len(self._generators) != len(states):
            raise SessionError(
                f"the loader has {len(self._generators)} generators of its own, and had {len(states)} when the snapshot was saved",
                hint="build the loader as in the run that was stopped",
            )
        for generator, state in zip(self._generators, states, strict=False):
            generator.set_state(state)

    def _reopened(self, loader: Iterable[Any], began: dict[str, Any]) -> Iterator[Any]:
        set_random_states(began)
        self._set_generators(began["generators"])
        iterator = iter(loader)
        skipped = skip_batches(iterator, self._batch)
        if skipped < self._batch:
            raise SessionError(
                f"the loader ended after {skipped} batches, and {self._batch} were delivered before the snapshot was saved",
                hint="build the loader as in the run that was stopped: the same data and the same batch size",
            )
        return iterator


def skip_batches(iterator: Any, count: int, *, following: Callable[[Any], Any] = next) -> int:
    """Advance ``iterator`` by ``count`` batches, if possible without loading them; return how many it had.

    Args:
        iterator: an iterator of a loader.
        count: the number of batches to skip.
        following: returns the iterator's next batch.
    """
    indexed = type(getattr(iterator, "_dataset_fetcher", None)).__name__ == "_MapDatasetFetcher"
    if indexed and type(iterator).__name__ == "_SingleProcessDataLoaderIter":
        skipped = sum(1 for _ in islice(iterator._sampler_iter, count))
        iterator._num_yielded += skipped
        return skipped
    for skipped in range(count):
        try:
            following(iterator)
        except StopIteration:
            return skipped
    return count


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators of a loader and its samplers, each once; without torch's default generator."""
    owners: list[Any] = [loader] if isinstance(loader, DataLoader) else []
    for name in ("sampler", "batch_sampler"):
        owners.append(getattr(loader, name, None))
    owners.append(getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    found = (getattr(one, "generator", None) for one in owners)
    return list(dict.fromkeys(one for one in found if isinstance(one, torch.Generator)))
