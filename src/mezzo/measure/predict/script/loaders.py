"""The loaders of a traced script: how many samples one pass draws, and how many a second this machine delivers without the model.

The script's loaders run in its own process while it is traced, on tensors without numbers. When all tapes are recorded, the loader of the
last step runs again as the script made it, with its workers, on zeros in place of those tensors. What a host delivers depends on the host,
so the rate is a bound for this machine and is multiplied with nothing.
"""

from __future__ import annotations

import functools
import math
import signal
import time
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.dataloader import _DatasetKind

from mezzo.engine.casts.registration import unwrapped
from mezzo.records import DataSet, LoaderRate, Note

_OF_WORKERS = ("num_workers", "prefetch_factor", "persistent_workers")

_MEASURED_S = 0.5
"""Batches are timed for this long, or until there are ``_LEAST``."""
_LEAST = 3
MOST_S = 5.0
"""The most time for all batches; a loader that delivers none in this time has no rate."""
_MOST_OBJECTS, _MOST_DEPTH = 100_000, 12
_MAPPED_BYTES = 64 << 20
"""The C library maps fresh pages for tensors of this size, which are zeros and take no memory until they are written."""


def first_size(values: Iterable[Any]) -> int | None:
    """Return the first dimension of the first tensor inside ``values`` that has one; None if there is none."""
    for value in values:
        if isinstance(value, Tensor):
            whole = unwrapped(value)  # inside vmap, value is one sample
            if whole.dim():
                return int(whole.shape[0])
            continue
        inside = value.values() if hasattr(value, "values") and callable(value.values) else value
        if isinstance(inside, (str, bytes)) or not isinstance(inside, Iterable):
            continue
        found = first_size(inside)
        if found is not None:
            return found
    return None


DrawnFrom: TypeAlias = tuple[Any, int]
"""The loader of a batch, None if it is not known, and the samples of the batch."""


class Loaders:
    """The loaders of a script: their own workers, and the loader of each pass."""

    def __init__(self) -> None:
        """Know no loader yet."""
        self._settings: WeakKeyDictionary[Any, Mapping[str, Any]] = WeakKeyDictionary()
        self._of_pass: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def made(self, loader: Any, data: Any, settings: Mapping[str, Any]) -> None:
        """Note what ``loader`` of ``data`` is made with; a library that copies another loader names the workers that this one has here."""
        own = {name: settings[name] for name in _OF_WORKERS if settings.get(name)}
        if not own and "num_workers" in settings:
            same = (known for other, known in self._settings.items() if getattr(other, "dataset", None) is data)
            own = dict(next(same, own))
        self._settings[loader] = own

    def begins(self, batches: Any, loader: Any) -> None:
        """Note that ``batches`` is a pass of ``loader``."""
        self._of_pass[batches] = loader

    def loader_of(self, batches: Any) -> Any:
        """Return the loader of a pass; None if it is not known."""
        return self._of_pass.get(batches)

    def restore(self, loader: Any) -> int:
        """Give ``loader`` its own workers again, and return their number."""
        own = self._settings.get(loader, {})
        workers = int(own.get("num_workers", 0))
        if workers:
            loader.num_workers = workers
            loader.prefetch_factor = own.get("prefetch_factor", 2)
            loader.multiprocessing_context = "fork"
            vars(loader)["persistent_workers"] = bool(own.get("persistent_workers"))  # torch refuses to change it
        return workers


def data_set_of(loader: Any, batch: int) -> DataSet:
    """Return how many samples one pass of ``loader`` draws, from what it says about itself; ``batch`` is the size of what it yields."""
    whole = _length(loader.dataset)
    sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    each, replicas = 1, 1
    if loader._dataset_kind == _DatasetKind.Iterable:
        drawn, each = whole, batch if loader.batch_size is None and loader.batch_sampler is None else 1
        if drawn is None:
            return DataSet(reason="it is read as a stream, without a length")
        return DataSet(samples=drawn * each)
    if loader.batch_sampler is None and not isinstance(sampler, BatchSampler):
        each = batch  # the data set's entries are batches
    inner = getattr(sampler, "sampler", None)
    if isinstance(sampler, BatchSampler) or (inner is not None and _length(inner) is not None):
        sampler = inner
    known = getattr(sampler, "num_replicas", 1)
    replicas = known if isinstance(known, int) and known > 0 else 1
    drawn = _length(sampler) if sampler is not loader.batch_sampler else None
    sizes = [size for size in (whole, None if drawn is None else drawn * replicas) if size is not None]
    if not sizes:
        return DataSet(reason="neither it nor its sampler has a length")
    return DataSet(samples=min(sizes) * each, processes=replicas)


def smallest_data(drawn: Sequence[DrawnFrom]) -> tuple[Any, DataSet | None]:
    """Return the loader of the smallest data set from which a step draws, and that data set; None for a step without loaders."""
    sizes = {id(loader): (loader, data_set_of(loader, size)) for loader, size in drawn}
    if not sizes:
        return None, None
    loader, data = min(sizes.values(), key=lambda one: math.inf if one[1].samples is None else one[1].samples)
    return loader, data.model_copy(update={"loaders": len(sizes)})


def at_both_sizes(own: DataSet | None, at_other_batch: DataSet | None) -> DataSet | None:
    """Return the data set, whose size is not known if the size of a batch changes it."""
    if own is None or at_other_batch is None or own.samples == at_other_batch.samples:
        return own
    return own.model_copy(
        update={"samples": None, "reason": "the script makes as much as the size of its batch asks for"}
    )


def notes_on(data: DataSet | None, batch: int) -> list[Note]:
    """Return a note on what the data set allows; none without a loader."""
    if data is None:
        return []
    if data.samples is None:
        return [Note(what="data set", value="of unknown size", reason=data.reason)]
    several = f"the smallest of the {data.loaders} from which a step draws; " if data.loaders > 1 else ""
    shared = f"shared by {data.processes} processes; " if data.processes > 1 else ""
    most = "no largest batch is above it"
    if batch > data.samples:
        most = f"batch {batch} is more than it has: the loader yields {data.samples} at most"
    return [Note(what="data set", value=f"{data.samples:,} samples", reason=f"{several}{shared}{most}")]


def _length(obj: Any) -> int | None:
    try:
        return len(obj)
    except Exception:  # a class of the script may raise what it likes
        return None


# --- the rate -------------------------------------------------------------------------------------------------------------------


class _Late(BaseException):
    """Ends a batch that takes too long; no handler of the script catches it."""


def rate_of(loader: Any, workers: int, *, batch: int) -> LoaderRate:
    """Return the samples a second that ``loader`` delivers here in batches of ``batch``, after one of each worker; never raises."""
    delivered: list[Delivered] = []
    try:
        with _limited(MOST_S):
            return _timed(loader, workers, delivered)
    except _Late:
        most = (len(delivered) + max(1, workers)) * batch / MOST_S
        return LoaderRate(samples_per_s=most, workers=workers, batches=len(delivered), is_bound=True)
    except Exception as error:  # the script's own code
        why = str(error).strip().partition("\n")[0]
        return LoaderRate(workers=workers, reason=f"it fails outside of the training: {type(error).__name__}: {why}")


Delivered: TypeAlias = tuple[float, int]
"""When a batch was delivered, and its samples."""


def _timed(loader: Any, workers: int, delivered: list[Delivered]) -> LoaderRate:
    Zeros().fill(loader)
    first = max(1, workers)
    for batch in _passes(loader):
        now = time.perf_counter()
        if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(batch)):
            return LoaderRate(workers=workers, reason="its samples are computed from tensors that have no numbers here")
        size = first_size([batch])
        if size is None:
            return LoaderRate(workers=workers, reason="its batches have no tensors")
        delivered.append((now, size))
        counted = delivered[first:]
        if len(counted) >= max(_LEAST, workers) and now - delivered[first - 1][0] >= _MEASURED_S:
            break
    counted = delivered[first:]
    if not counted:
        return LoaderRate(workers=workers, reason="a pass has no second batch")
    took_s = counted[-1][0] - delivered[first - 1][0]
    rate = sum(size for _, size in counted) / max(1e-9, took_s)
    return LoaderRate(samples_per_s=rate, workers=workers, batches=len(counted))


def _passes(loader: Any) -> Iterator[Any]:
    """Yield the batches of several passes, as epochs do; what a library's class adds to a pass, such as moves to a GPU, is left out."""
    for _ in range(1 << 20):
        empty = True
        for batch in DataLoader.__iter__(loader):
            empty = False
            yield batch
        if empty:
            return


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise ``_Late`` in the block after ``seconds``."""

    def late(*_: object) -> None:
        raise _Late

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


class Zeros:
    """Replaces the tensors without numbers that a loader reaches, in place."""

    def __init__(self) -> None:
        """Have seen nothing."""
        self._seen: dict[int, Any] = {}
        self._tensors: dict[int, Tensor] = {}

    def fill(self, loader: Any) -> None:
        """Replace what the samples of ``loader`` are made of: in its data set, samplers and functions, and in globals that these name."""
        for name in ("dataset", "sampler", "batch_sampler", "collate_fn"):
            self._filled(getattr(loader, name, None), 0)

    def _filled(self, obj: Any, depth: int) -> Any:
        if isinstance(obj, FakeTensor):
            return self._zeros(obj)
        if isinstance(obj, (str, bytes, int, float, type, types.ModuleType, nn.Module, Tensor)) or obj is None:
            return obj
        if id(obj) in self._seen or len(self._seen) > _MOST_OBJECTS or depth > _MOST_DEPTH:
            return obj
        self._seen[id(obj)] = obj
        if isinstance(obj, tuple):
            new = [self._filled(one, depth + 1) for one in obj]
            if all(a is b for a, b in zip(new, obj, strict=True)):
                return obj
            return type(obj)(*new) if hasattr(obj, "_fields") else type(obj)(new)
        if isinstance(obj, (list, dict)):
            self._fill_items(obj, depth)
        elif isinstance(obj, (types.FunctionType, types.MethodType, functools.partial)):
            self._fill_function(obj, depth)
        elif hasattr(obj, "__dict__"):
            self._fill_items(vars(obj), depth)
            for name in ("__getitem__", "__getitems__", "__iter__", "__call__"):
                self._filled(getattr(type(obj), name, None), depth + 1)
        return obj

    def _fill_items(self, items: Any, depth: int) -> None:
        for key, value in list(items.items() if isinstance(items, dict) else enumerate(items)):
            new = self._filled(value, depth + 1)
            if new is not value:
                items[key] = new

    def _fill_function(self, function: Any, depth: int) -> None:
        if isinstance(function, types.MethodType):
            self._filled(function.__self__, depth + 1)
            function = function.__func__
        if isinstance(function, functools.partial):
            for value in (function.func, function.args, function.keywords):
                self._filled(value, depth + 1)
            return
        if not isinstance(function, types.FunctionType):
            return
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # it is empty
                cell.cell_contents = self._filled(cell.cell_contents, depth + 1)
        named = function.__globals__
        for name in function.__code__.co_names:
            if name in named:
                named[name] = self._filled(named[name], depth + 1)

    def _zeros(self, fake: Tensor) -> Tensor:
        if id(fake) not in self._tensors:
            size, stride = tuple(map(int, fake.size())), tuple(map(int, fake.stride()))
            found = torch.empty_strided(size, stride, dtype=fake.dtype)
            self._seen[id(fake)] = fake  # its number stays its own
            self._tensors[id(fake)] = found if found.untyped_storage().nbytes() >= _MAPPED_BYTES else found.zero_()
        return self._tensors[id(fake)]
