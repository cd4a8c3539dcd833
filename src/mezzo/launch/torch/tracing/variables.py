"""The state of a script, found through its variables: what a debugger would show at the top of its training loop.

In the frames of the script's own files every variable is followed: models, optimizers, schedulers, scalers and generators by their
states, numbers, texts and lists by value, tensors by their elements, objects of the script's own classes by their attributes. The record
names what cannot be followed. In a script that was started again, the same path leads to the same variable, whose state is then restored.
"""

from __future__ import annotations

import random
import sys
import types
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

_LEAVES = (type(None), bool, int, float, str, bytes, complex, np.number, np.bool_)
_NOT_STATE = (
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.GeneratorType,
    type(annotations),  # what ``from __future__`` imports
    type,
    PurePath,
    ArgumentParser,
    torch.device,
    torch.dtype,
    Dataset,
    DataLoader,
    Sampler,
)
"""Kinds of objects that a script creates again, or that the position in the data covers."""
_MAX_BYTES = 2**20
"""Larger tensors that were never changed in place are data, not state."""
_MAX_VALUES = 100_000
_MAX_DEPTH = 6


class ScriptState:
    """The state of a script's variables, with the objects found in them, and what was left out."""

    def __init__(self, is_own: Callable[[str], bool]) -> None:
        """Start without variables; ``is_own`` returns whether a module's file is one of the script's."""
        self._is_own = is_own
        self._seen: set[int] = set()
        self._only_finds = False
        self.objects: dict[str, Any] = {}
        """Models, optimizers and the like, by their paths."""
        self.left_out: dict[str, str] = {}
        """What was not saved, and why, by path."""

    def frame(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a frame's variables."""
        named = {name: value for name, value in variables.items() if not name.startswith("_")}
        # A first walk only finds objects, so that the second does not save their parts once more, as variables of their own.
        self._only_finds, before = True, set(self._seen)
        objects, left_out = dict(self.objects), dict(self.left_out)
        self._entries(named, "")
        self._only_finds, self._seen = False, before | self._parts()
        self.objects, self.left_out = objects, left_out
        return self._entries(named, "")

    def _parts(self) -> set[int]:
        """Return the ids of the parts of objects that are saved whole: a model's layers and weights, an optimizer's groups."""
        parts: set[int] = set()
        for value in self.objects.values():
            if isinstance(value, nn.Module):
                inner = (*value.modules(), *value.parameters(), *value.buffers())
                parts |= {id(part) for part in inner} - {id(value)}
            elif isinstance(value, Optimizer):
                parts |= {id(part) for group in value.param_groups for part in (group, group["params"])}
                parts |= {id(value.param_groups), id(value.state)}
        return parts

    def _entries(self, values: Mapping[Any, Any], path: str) -> dict[Any, Any]:
        entries = {}
        for name, value in values.items():
            entry = self._entry(value, f"{path}.{name}" if path else str(name))
            if entry is not None:
                entries[name] = entry
        return entries

    def _entry(self, value: Any, path: str) -> dict[str, Any] | None:
        if isinstance(value, _NOT_STATE) or path.count(".") > _MAX_DEPTH:
            return None
        if isinstance(value, _LEAVES):
            return {"value": value}
        if id(value) in self._seen:  # another name for the same object
            return None
        self._seen.add(id(value))
        kind = kind_of(value)
        if kind is not None:
            self.objects[path] = value
            return {kind: None}
        if isinstance(value, (Tensor, np.ndarray)):
            return self._array(value, path)
        if _is_plain(value):
            return {"value": value}
        if isinstance(value, (list, tuple)):
            return {"items": self._entries(dict(enumerate(value)), path)}
        if isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value):
            return {"items": self._entries(value, path)}
        if isinstance(value, (Namespace, types.SimpleNamespace)) or self._is_own(type(value).__module__):
            return {"attributes": self._entries(getattr(value, "__dict__", {}), path)}
        self.left_out[path] = f"a {type(value).__module__}.{type(value).__qualname__}"
        return None

    def _array(self, value: Any, path: str) -> dict[str, Any] | None:
        if isinstance(value, Tensor) and value.grad_fn is not None:  # a result of a step that is over
            return {"value": value.detach()} if value.numel() == 1 else None
        large = value.nbytes > _MAX_BYTES
        if large and not (isinstance(value, Tensor) and (value._version or value.requires_grad)):
            if isinstance(value, np.ndarray) or value.is_floating_point():
                self.left_out[path] = f"{value.nbytes:,} bytes that the loop has not changed in place, taken for data"
            return None
        return {"value": value.detach() if isinstance(value, Tensor) else value}


def kind_of(value: Any) -> str | None:
    """Return the kind of an object that has a state of its own; None for any other value."""
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, Optimizer):
        return "optimizer"
    if isinstance(value, (LRScheduler, torch.amp.GradScaler)):
        return "stateful"
    if isinstance(value, torch.Generator):
        return "generator"
    if isinstance(value, np.random.Generator):
        return "numpy"
    return "python" if isinstance(value, random.Random) else None


def _is_plain(value: Any) -> bool:
    """Return whether a container has only plain values, and not too many."""
    left, waiting = _MAX_VALUES, [value]
    while waiting and left > 0:
        item = waiting.pop()
        left -= 1
        if type(item) is dict:
            waiting += [*item.keys(), *item.values()]
        elif type(item) in (list, tuple, set):
            waiting += item
        elif not isinstance(item, _LEAVES):
            return False
    return not waiting


def script_folder() -> Path:
    """Return the folder of the script that is running."""
    return Path(getattr(sys.modules["__main__"], "__file__", None) or "").absolute().parent


def is_below(folder: Path) -> Callable[[str], bool]:
    """Return a function that returns whether a module is one of the script's own: in ``folder``, and in no installed package."""

    def own(module: str) -> bool:
        file = getattr(sys.modules.get(module), "__file__", None)
        return module == "__main__" or is_own_file(file, folder)

    return own


def is_own_file(file: str | None, folder: Path) -> bool:
    """Return whether a file is one of the script's."""
    if file is None:
        return False
    path = Path(file).absolute()
    return folder in path.parents and "site-packages" not in path.parts
