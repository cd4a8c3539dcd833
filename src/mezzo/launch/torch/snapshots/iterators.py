"""Iterators whose position can be saved: Python's own, those of ``itertools``, of a ``DataLoader`` and of ``tqdm``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from mezzo.engine.randomness import random_states, set_random_states
from mezzo.engine.snapshots.position import generators_of, skip_batches
from mezzo.errors import NotSavable, SnapshotError
from mezzo.launch.patches import Patches
from mezzo.launch.torch.snapshots.functions import CALLED, call, called
from mezzo.launch.torch.snapshots.known_types import Described, Parts
from mezzo.launch.torch.snapshots.walk import Kind, State, Turn, Walk

_EMPTY: list[Any] = [[], (), range(0), range(2**70), {}, {}.items(), {}.values(), set(), "", "é", b""]
_REVERSIBLE: list[Any] = [[], {}, {}.items(), {}.values()]
ITERATOR_TYPES: list[type] = [
    *(type(iter(one)) for one in _EMPTY),
    *(type(reversed(one)) for one in _REVERSIBLE),
    type(iter(int, 1)),
    *(one for name, one in CALLED.items() if isinstance(one, type) and hasattr(one, "__next__")),
]
_NAMES = {id(one): name for name, one in CALLED.items()}


def iterator(walk: Walk, value: Any) -> Described:
    """Describe one of Python's own iterators: what makes it again, and its position."""
    by, arguments, *at = value.__reduce__()
    name = _NAMES.get(id(by)) or type(value).__name__
    if name not in CALLED:
        raise walk.refusal(value)
    _, parts = call(walk, name, {f"[{n}]": one for n, one in enumerate(arguments)})
    return "iterator", parts | ({"at": at[0]} if at else {})


def _fill_iterator(value: Any, state: State) -> None:
    if "at" in state:
        value.__setstate__(state["at"])


class TqdmIterator:
    """What ``tqdm.__iter__`` yields, as an object with a position instead of a generator."""

    def __init__(self, bar: Any) -> None:
        self.bar, self.iterator = bar, iter(bar.iterable)

    def __iter__(self) -> TqdmIterator:
        return self

    def __next__(self) -> Any:
        try:
            item = next(self.iterator)
        except StopIteration:
            self.bar.close()
            raise
        self.bar.update(1)
        return item


class OwnIterator:
    """An iterator of the script's own class: the loop must not call its ``__iter__`` once more, which may begin anew."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator

    def __iter__(self) -> OwnIterator:
        return self

    def __next__(self) -> Any:
        return next(self.iterator)


def iterator_of(iterable: Any) -> Iterator[Any]:
    """Return what a ``for`` statement would iterate over."""
    iterator = iter(iterable)
    is_own = isinstance(getattr(type(iterator), "__iter__", None), FunctionType)
    return (
        OwnIterator(iterator) if is_own and not isinstance(iterator, (_BaseDataLoaderIter, TqdmIterator)) else iterator
    )


POSITIONS = {*ITERATOR_TYPES, OwnIterator, TqdmIterator}
"""Iterators that are made anew at a position."""


def install_passes(patches: Patches, capture: Callable[[Any], Any]) -> None:
    """Keep, for each pass over a loader, what its order follows from, until ``patches`` are undone.

    Args:
        patches: what is changed in torch and tqdm.
        capture: returns the state of a loader's samplers, as JSON and tensors.
    """

    def deliver(original: Any, iterator: Any) -> Any:
        if iterator._mezzo_first is None:  # samplers begin at the first request
            iterator._mezzo_first = _states(iterator._mezzo_loader)
            iterator._mezzo_samplers = capture(iterator._mezzo_loader)
        return original(iterator)

    patches.around(_BaseDataLoaderIter, "__init__", _begin)
    patches.around(_BaseDataLoaderIter, "__next__", deliver)
    if "tqdm" in sys.modules:
        tqdm = sys.modules["tqdm.std"].tqdm

        patches.around(tqdm, "__iter__", lambda original, bar: TqdmIterator(bar))


def _states(loader: Any) -> dict[str, Any]:
    return {**random_states(), "loader": [generator.get_state() for generator in generators_of(loader)]}


def _set(states: dict[str, Any], loader: Any) -> None:
    set_random_states(states)
    for generator, state in zip(generators_of(loader), states["loader"], strict=True):
        generator.set_state(state)


def _begin(original: Any, iterator: Any, loader: Any) -> None:
    iterator._mezzo_loader, iterator._mezzo_began = loader, _states(loader)
    iterator._mezzo_first = iterator._mezzo_samplers = None
    original(iterator, loader)


def loader_pass(walk: Walk, value: Any) -> Described:
    """Describe a pass over a loader: how it began, and how many batches it has delivered."""
    if getattr(value._mezzo_loader, "persistent_workers", False):
        raise NotSavable(
            "a DataLoader has persistent_workers=True: the random generators of its workers cannot be read",
            hint="pass persistent_workers=False",
        )
    parts: Parts = {name: getattr(value, f"_mezzo_{name}") for name in ("loader", "began", "first", "samplers")}
    parts |= {"delivered": value._num_yielded, "class": type(value)}
    fetcher: Any = getattr(value, "_dataset_fetcher", None)
    stream = getattr(fetcher, "dataset_iter", None)
    return "pass", parts | ({} if stream is None else {"stream": stream, "ended": fetcher.ended})


def _reopen(shell: Any, state: State) -> None:
    """Turn an empty iterator into the pass that was saved: begun again, and moved to its position."""
    loader: DataLoader[Any] = state["loader"]
    delivered, samplers, first = state["delivered"], state["samplers"], state["first"]
    state.restoration.set_samplers(loader, samplers)
    _set(state["began"], loader)
    type(shell).__init__(shell, loader)
    if first is not None:
        if not hasattr(shell, "_workers"):
            state.restoration.set_samplers(loader, samplers)
            _set(first, loader)
        if "stream" in state:
            shell._dataset_fetcher.dataset_iter, shell._dataset_fetcher.ended = state["stream"], state["ended"]
            shell._num_yielded = delivered
        elif skip_batches(shell, delivered) < delivered:
            raise SnapshotError(
                f"the DataLoader has fewer than the {delivered} batches that it had delivered",
                hint="resume with the same script, the same arguments and the same data",
            )
        shell._mezzo_first, shell._mezzo_samplers = first, samplers


KINDS: dict[str, Kind] = {
    "iterator": Kind(called, _fill_iterator, Turn.LAST),
    "pass": Kind(lambda state: state.type(_BaseDataLoaderIter).__new__(state["class"]), _reopen, Turn.LAST),
}
