"""The batches that a script's loaders yield: counted, and yielded at another size."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.weak import WeakIdKeyDictionary

from mezzo.engine.casts.registration import unwrapped


class ScriptBatches:
    """Watches a script's loaders; those with batches of size ``own`` yield batches of size ``wanted`` instead."""

    def __init__(self, *, own: int | None = None, wanted: int | None = None) -> None:
        self._own, self._wanted = own, wanted
        self.drawn: list[int] = []
        """Samples of each batch drawn since ``restart``."""
        self.loading: Callable[[], AbstractContextManager[None]] = nullcontext
        """A context for each batch that a loader prepares: its transforms, even if they are modules, are the host's work."""

    def restart(self) -> list[int]:
        """Return ``drawn``, and empty it."""
        drawn, self.drawn = self.drawn, []
        return drawn

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch for the block. Loaders run in this process: workers would not see fake tensors."""
        original_init, original_sampler_init, original_next = (
            DataLoader.__init__,
            BatchSampler.__init__,
            _BaseDataLoaderIter.__next__,
        )

        def loader(instance: Any, dataset: Any, batch_size: int | None = 1, *args: Any, **settings: Any) -> None:
            settings |= {name: 0 for name in ("num_workers", "timeout") if name in settings}
            settings |= {name: None for name in ("prefetch_factor", "multiprocessing_context") if name in settings}
            settings |= {name: False for name in ("persistent_workers", "pin_memory") if name in settings}
            original_init(instance, dataset, self._size(batch_size), *args, **settings)

        def sampler(instance: Any, source: Any, batch_size: int, drop_last: bool) -> None:
            original_sampler_init(instance, source, self._size(batch_size), drop_last)

        def following_batch(instance: Any) -> Any:
            with self.loading():
                batch = original_next(instance)
            size = first_size([batch])
            if size is not None:
                self.drawn.append(size)
            return batch

        with ExitStack() as stack:
            stack.enter_context(patch.object(DataLoader, "__init__", loader))
            stack.enter_context(patch.object(BatchSampler, "__init__", sampler))
            stack.enter_context(patch.object(_BaseDataLoaderIter, "__next__", following_batch))
            yield

    def _size(self, size: Any) -> Any:
        return self._wanted if self._wanted is not None and size == self._own else size


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


# --- Keep in memory what a traced script saves, because its tensors have no numbers and must not overwrite a real file ----------

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
