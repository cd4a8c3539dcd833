"""Know what tensors would hold if 16-bit formats had no largest number, or no smallest one.

A value that leaves a format's range becomes infinite or zero. Whether that matters shows later: softmax makes the same of
-inf and of -1e9, ``x / norm`` does not make the same of an infinite norm and of 1e5. So where values were lost, the true ones
are kept beside them and every operation that reads them is computed a second time, in FP32, from the true ones, and
rounded to the format's digits as the operation itself was. The two computations differ in nothing but the range: what is
equal again is no longer kept, and what still differs in a gradient is what the range did to it.

There are two such views of a step, one for each end of the range (``End``). Where values became too small, what follows is
computed without an upper end either: what was divided by is often multiplied by again. Kept are only the elements that differ, by storage,
so that views see them too. Cost: a second computation of what reads such elements, 16 bytes for each of them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mezzo.engine.half import HALF
from mezzo.formats import BF16, FP16, FP32
from mezzo.observe.tensors import storage

T = TypeVar("T")

_SAME = {BF16.dtype: 4 * BF16.eps}
_SAME_ELSEWHERE = 4 * FP16.eps
_SWEEP = 256


class End(enum.Enum):
    """An end of a format's range."""

    ABOVE = "above"
    BELOW = "below"

    def loses(self, dtype: torch.dtype) -> bool:
        """Return whether values are watched that leave a format at this end: below, FP16 alone ends where values are."""
        return dtype in HALF if self is End.ABOVE else dtype is FP16.dtype

    def lost(self, narrow: Tensor, wide: Tensor) -> Tensor:
        """Return where ``narrow`` lost what ``wide`` holds."""
        if self is End.ABOVE:
            return wide.isfinite() & ~narrow.isfinite()
        return (narrow == 0) & (wide != 0) & wide.isfinite()


class Storages(Generic[T]):
    """One value for each storage that is alive; a storage that reuses the memory of a dead one has none."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[StorageWeakRef, T]] = {}  # the reference keeps the number from being given again
        self._sweep_at = _SWEEP

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, tensor: Tensor) -> T | None:
        """Return what is kept for the storage of ``tensor``."""
        number = _number(tensor)
        found = None if number is None else self._kept.get(number)
        return None if found is None else found[1]

    def put(self, tensor: Tensor, value: T) -> None:
        """Keep ``value`` for the storage of ``tensor``; of a tensor without one (sparse), nothing is kept."""
        number = _number(tensor)
        if number is None:
            return
        if len(self._kept) >= self._sweep_at:
            self._kept = {n: kept for n, kept in self._kept.items() if not kept[0].expired()}
            self._sweep_at = max(_SWEEP, 2 * len(self._kept))
        self._kept[number] = StorageWeakRef(tensor.untyped_storage()), value

    def drop(self, which: Callable[[T], bool]) -> None:
        """Forget the values that ``which`` tells."""
        self._kept = {number: kept for number, kept in self._kept.items() if not which(kept[1])}

    def pop(self, tensor: Tensor) -> None:
        """Forget what is kept for the storage of ``tensor``."""
        number = _number(tensor)
        if number is not None:
            self._kept.pop(number, None)


def _number(tensor: Tensor) -> int | None:
    own = storage(tensor)
    return None if own is None else int(own._cdata)


@dataclass
class _Twin(Generic[T]):
    """The elements of a storage that differ from what they would be."""

    places: Tensor
    actual: Tensor
    """What stood there: an element that was written unseen is not believed."""
    true: Tensor
    """In FP32 or FP64; truth values and whole numbers as they are."""
    sources: tuple[T, ...]
    mark: int


class Twins(Generic[T]):
    """True values for one end of the range, each with its sources."""

    def __init__(self, end: End) -> None:
        self.end = end
        self._twins: Storages[_Twin[T]] = Storages()
        self._mark = 0

    def mark(self) -> None:
        """Record that what was kept until now belongs to the step."""
        self._mark += 1

    def turn(self) -> None:
        """Begin another step: what the one before it left behind, as running statistics, counts as true in this one."""
        self._twins.drop(lambda twin: twin.mark < self._mark)

    def __bool__(self) -> bool:
        return len(self._twins) > 0

    def read(self, tensor: Tensor) -> tuple[Tensor, tuple[T, ...]] | None:
        """Return the true values of ``tensor``, those of 16 bits in FP32, with their sources; None where it holds them itself."""
        twin = self._twins.get(tensor)
        if twin is None or tensor.layout is not torch.strided:
            return None
        flat = _flat(tensor)
        if not bool(_equal(flat[twin.places], twin.actual).all()):
            self._twins.pop(tensor)
            return None
        wide = _wide(flat)
        wide[twin.places] = twin.true
        true = wide.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if tensor.numel() < flat.numel() and bool(
            _equal(true, tensor.detach().to(true.dtype)).all()
        ):  # they lie outside this view
            return None
        return true, twin.sources

    def write(self, tensor: Tensor, true: Tensor, sources: tuple[T, ...]) -> bool:
        """Keep what ``tensor`` would hold where that differs; return whether it does anywhere."""
        if tensor.layout is not torch.strided or _number(tensor) is None:
            return False
        before, flat = self._twins.get(tensor), _flat(tensor)
        if tensor.numel() == flat.numel() and tensor.is_contiguous():
            whole = true.reshape(-1)
        else:
            whole = _wide(flat)
            if before is not None:
                kept = _equal(flat[before.places], before.actual)
                whole[before.places[kept]] = before.true[kept]
                sources = tuple(dict.fromkeys((*before.sources, *sources)))
            whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(true)
        places = differs(flat, whole).nonzero().flatten()
        if not len(places):
            self._twins.pop(tensor)
            return False
        self._twins.put(tensor, _Twin(places, flat[places], whole[places], sources, self._mark))
        return True

    def forget(self, tensor: Tensor) -> None:
        """Take what ``tensor`` holds for true."""
        if self._twins.get(tensor) is not None:
            self.write(tensor, _wide(tensor.detach()), ())


def rounded(wide: Tensor, dtype: torch.dtype, end: End) -> Tensor:
    """Return ``wide`` with the digits of ``dtype``; a value that would be lost at ``end`` stays as it is.

    Where that is the lower one, so does a value that would be lost at the upper one.
    """
    if not dtype.is_floating_point or dtype.itemsize >= FP32.dtype.itemsize:
        return wide
    narrow = wide.to(dtype).float()
    for lost_end in (End.ABOVE, end):
        narrow = torch.where(lost_end.lost(narrow, wide), wide, narrow) if lost_end.loses(dtype) else narrow
    return narrow


def differs(actual: Tensor, true: Tensor) -> Tensor:
    """Return where ``actual`` is off from ``true`` by more than a few units of the last place."""
    if not actual.is_floating_point():
        return actual != true
    found, limit = actual.to(true.dtype), _SAME.get(actual.dtype, _SAME_ELSEWHERE)
    near = (found - true).abs() <= limit * true.abs()
    return ~(_equal(found, true) | (near & true.isfinite()))


def _equal(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() else a == b


def _flat(tensor: Tensor) -> Tensor:
    """Return the whole storage of ``tensor`` in one dimension."""
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return whole.set_(tensor.untyped_storage())


def _wide(tensor: Tensor) -> Tensor:
    """Return a copy, one of 16 bits in FP32."""
    narrow = tensor.is_floating_point() and tensor.element_size() < FP32.dtype.itemsize
    return tensor.float() if narrow else tensor.clone()
