"""Keep in memory what a traced script saves, because its tensors have no numbers and must not overwrite a real file.

The script loads what it saved from there. Other files are read as torch reads them without numbers.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary


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
