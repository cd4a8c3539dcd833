"""The data of a traced script: batches are counted and yielded at another size, lengths are the longest, files stay in memory."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map_only
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.weak import WeakIdKeyDictionary

from mezzo.engine.loop_checks import in_fp32
from mezzo.engine.session import Session
from mezzo.measure.predict.script.loaders import DrawnFrom, Loaders, first_size

_POSITIONAL = (
    "shuffle",
    "sampler",
    "batch_sampler",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "drop_last",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
)
"""Settings of a loader that may follow its data set and its batch size without a name."""


class ScriptBatches:
    """Watches a script's loaders; those with batches of size ``own`` yield batches of size ``wanted`` instead."""

    def __init__(
        self,
        *,
        own: int | None = None,
        wanted: int | None = None,
        loading: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Watch nothing yet; ``loading`` opens a context for each batch that a loader prepares, which is the host's work."""
        self._own, self._wanted, self._loading = own, wanted, loading
        self.drawn: list[int] = []
        """Samples of each batch drawn since ``restart``."""
        self.loaders = Loaders()
        self._drawn_from: list[DrawnFrom] = []

    def restart(self) -> tuple[list[int], list[DrawnFrom]]:
        """Return ``drawn`` and the loaders of these batches, and empty both."""
        drawn, self.drawn = self.drawn, []
        loaders, self._drawn_from = self._drawn_from, []
        return drawn, loaders

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch for the block. Loaders run in this process: workers would not see fake tensors."""
        original_init, original_sampler_init, original_next, original_pass = (
            DataLoader.__init__,
            BatchSampler.__init__,
            _BaseDataLoaderIter.__next__,
            _BaseDataLoaderIter.__init__,
        )

        def loader(instance: Any, dataset: Any, batch_size: int | None = 1, *args: Any, **settings: Any) -> None:
            settings |= dict(zip(_POSITIONAL, args, strict=False))
            self.loaders.made(instance, dataset, settings)
            settings |= {name: 0 for name in ("num_workers", "timeout") if name in settings}
            settings |= {name: None for name in ("prefetch_factor", "multiprocessing_context") if name in settings}
            settings |= {name: False for name in ("persistent_workers", "pin_memory") if name in settings}
            original_init(instance, dataset, self._size(batch_size), **settings)

        def starting_pass(instance: Any, of: Any) -> None:
            original_pass(instance, of)
            self.loaders.begins(instance, of)

        def sampler(instance: Any, source: Any, batch_size: int, drop_last: bool) -> None:
            original_sampler_init(instance, source, self._size(batch_size), drop_last)

        def following_batch(instance: Any) -> Any:
            with self._loading():
                batch = original_next(instance)
            size = first_size([batch])
            if size is not None:
                self.drawn.append(size)
                self._drawn_from.append((self.loaders.loader_of(instance), size))
            return batch

        with ExitStack() as stack:
            stack.enter_context(patch.object(DataLoader, "__init__", loader))
            stack.enter_context(patch.object(BatchSampler, "__init__", sampler))
            stack.enter_context(patch.object(_BaseDataLoaderIter, "__next__", following_batch))
            stack.enter_context(patch.object(_BaseDataLoaderIter, "__init__", starting_pass))
            yield

    def _size(self, size: Any) -> Any:
        return self._wanted if self._wanted is not None and size == self._own else size


# The script loads what it saved from there. Other files are read as torch reads them without numbers.


@contextmanager
def saved_in_memory() -> Iterator[None]:
    """Keep the arguments of ``torch.save`` in the block for ``torch.load``."""
    files: dict[str, Any] = {}
    buffers: Any = WeakIdKeyDictionary()

    def save(obj: object, f: Any, *_: object, **__: object) -> None:
        path = _path_of(f)
        if path is None:
            buffers[f] = _copied(obj)
        else:
            files[path] = _copied(obj)

    def loading(original: Callable[..., Any]) -> Callable[..., Any]:
        def load(f: Any, *args: Any, **kwargs: Any) -> Any:
            path = _path_of(f)
            if path is None and f in buffers:
                return _copied(buffers[f])
            return _copied(files[path]) if path in files else original(f, *args, **kwargs)

        return load

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "save", save))
        stack.enter_context(patch.object(torch, "load", loading(torch.load)))
        yield


def _path_of(f: Any) -> str | None:
    """Return the path of a file that is named or opened; None for a buffer."""
    name = f if isinstance(f, (str, os.PathLike)) else getattr(f, "name", None)
    return os.path.realpath(os.fspath(name)) if isinstance(name, (str, os.PathLike)) else None


def _copied(obj: Any) -> Any:
    """Return ``obj`` with copies of its tensors; other objects, such as a whole model, are copied by ``copy.deepcopy``."""
    if isinstance(obj, torch.nn.Module):
        return copy.deepcopy(obj)
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), obj)


# The lengths are numbers, so a packed batch has as many rows as its padded one, and a recurrent layer gets the padded batch.
# So memory is an upper bound and throughput a lower bound; the record says so, and names the lines.


@contextmanager
def longest_sequences(on_pack: Callable[[], None]) -> Iterator[None]:
    """Let packed sequences be of the largest size for the block; ``on_pack`` is called for each that is packed."""

    def pack(padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        on_pack()
        steps_first = padded.transpose(0, 1) if batch_first else padded
        steps = steps_first.shape[0]
        return steps_first.reshape(-1, *padded.shape[2:]), torch.empty(steps, dtype=torch.int64)

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch._VF, "_pack_padded_sequence", pack, create=True))
        stack.enter_context(patch.object(torch._VF, "_pad_packed_sequence", _pad, create=True))
        for kind in (nn.RNN, nn.LSTM, nn.GRU):
            stack.enter_context(patch.object(kind, "forward", _of_padded(kind.forward)))
        yield


def _pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    steps_first = data.reshape(batch_sizes.shape[0], -1, *data.shape[1:])
    steps, batch = steps_first.shape[:2]
    if total_length > steps:
        rest = steps_first.new_full((total_length - steps, *steps_first.shape[1:]), padding_value)
        steps_first = torch.cat([steps_first, rest])
    padded = steps_first.transpose(0, 1) if batch_first else steps_first
    return padded.contiguous(), torch.empty(batch, dtype=torch.int64)


def _of_padded(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a layer's ``forward`` that computes a packed sequence as a padded batch."""

    def forward(layer: Any, input: Any, hx: Any = None) -> Any:
        if not isinstance(input, PackedSequence):
            return original(layer, input, hx)
        data, batch_sizes, order, back = input
        padded = data.reshape(batch_sizes.shape[0], -1, *data.shape[1:])
        if hx is not None:
            hx = layer.permute_hidden(hx, order)
        out, hidden = original(layer, padded.transpose(0, 1) if layer.batch_first else padded, hx)
        if layer.batch_first:
            out = out.transpose(0, 1)
        flat = out.reshape(-1, *out.shape[2:])
        return PackedSequence(flat, batch_sizes, order, back), layer.permute_hidden(hidden, back)

    return forward


# An operation on fake tensors takes about 0.2 ms, however small it is. A loop that makes a data set sample by sample runs hundreds
# of thousands of them, once for each tape. So a script that runs ``MOST_OPERATIONS`` before it builds its first module is
# restarted, with real tensors up to that module. The limit counts operations instead of seconds, so that a script is always traced
# in the same way.
#
# Limit: data that a script prepares after its first module have no numbers, and may take long.

MOST_OPERATIONS = 20_000


class SlowData(BaseException):
    """Stops a script that still prepares its data: no handler of its own catches it."""


class CountedFakeMode(FakeTensorMode):
    """Fake tensors that count operations until the script has built its first module."""

    def __init__(self) -> None:
        """Start to count."""
        super().__init__(allow_non_fake_inputs=True)
        self._left: int | None = MOST_OPERATIONS

    def stop_counting(self) -> None:
        """Let the script run as many operations as it likes."""
        self._left = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation.

        Raises:
            SlowData: the script has run too many before its first module.
        """
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise SlowData
        return super().__torch_dispatch__(func, types, args, kwargs or {})


@contextmanager
def before_first_module(call: Callable[[], None]) -> Iterator[None]:
    """Call ``call`` once, before the block builds its first module."""
    original, called = nn.Module.__init__, False

    def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        nonlocal called
        if not called:
            called = True
            call()
        original(module, *args, **kwargs)

    with patch.object(nn.Module, "__init__", init):
        yield


# A script's autocast would lower the tape of ``fp32`` as well. Its GradScaler reads whether gradients are finite, which traced
# tensors cannot show, and would skip every step. A ``mezzo.Session`` does both. An ``autocast(enabled=False)`` stays: it keeps an
# operation in FP32 under any policy.


@contextmanager
def without_own_amp() -> Iterator[None]:
    """Turn off each autocast, GradScaler and session that the block makes or enters."""
    with ExitStack() as stack:
        for kind, name, wrapped in (
            (autocast, "__enter__", _entered),
            (autocast, "__exit__", _left),
            (GradScaler, "__init__", _off),
            (Session, "__init__", in_fp32),
        ):
            stack.enter_context(patch.object(kind, name, wrapped(getattr(kind, name))))
        yield


def _entered(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def enter(self: Any) -> Any:
        return self if self._enabled else original(self)

    return enter


def _left(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def leave(self: Any, *error: Any) -> Any:
        return None if self._enabled else original(self, *error)

    return leave


def _off(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **settings: Any) -> None:
        original(self, *args[:5], **{**settings, "enabled": False})

    return init
