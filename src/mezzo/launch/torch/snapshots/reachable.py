"""Digests of what a script can reach, by name: two processes that are in the same state have the same ones.

This walk proves snapshots, so another takes them: it asks each object for its attributes, its elements, or what ``copy``
would take, and never looks at what set-up had made. Of two names of one object, the second has the first as its digest.

Limits: objects in sets, class attributes of other modules than the main one, memory maps and the objects of some libraries are not
compared; of an array above 1 GiB only a sample is.
"""

from __future__ import annotations

import collections
import decimal
import gc
import os
import sys
import types
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data.dataloader import _BaseDataLoaderIter

from mezzo.engine.randomness import random_states

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_LIBRARIES = (
    "mezzo.", "logging.", "threading.", "_thread.", "concurrent.", "multiprocessing.", "weakref.", "importlib.", "_frozen_importlib.",
    "typing.", "abc.", "_abc.", "torch._C.", "torch._dynamo.", "torch._inductor.", "torch.fx.", "torch.jit.",
    "torch.utils.tensorboard.", "tensorboard.", "tensorboardX.", "wandb.", "mlflow.",
)  # fmt: skip
"""Their objects have locks, times and process numbers, and nothing that training reads."""
_MOST_VALUES = 1_000_000
_WHOLE_BYTES, _SAMPLE_BYTES = 2**30, 2**26
"""Of a larger array, only so many bytes are read, at equal distances."""
_BAR = ("iterable", "total", "desc", "n")
"""Of a progress bar; the rest is times."""


def digests_of(variables: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, str]:
    """Return a digest of each value that variables lead to, by its path; generators and library settings belong to it.

    Args:
        variables: of each module and frame, its name and its variables.

    Raises:
        ValueError: they lead to more than a million values.
    """
    walk = _Walk()
    for name, held in variables:
        for variable, value in held.items():
            walk.visit(value, f"{name}{variable}")
    for name, state in random_states().items():
        walk.visit(state, f"random generator {name}")
    for name, value in settings_now().items():
        walk.visit(value, f"setting {name}")
    return walk.digests


class _Walk:
    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        self._paths: dict[int, str] = {}
        self._kept: list[Any] = []
        """What was visited, so that no other object gets its id."""

    def visit(self, root: Any, name: str) -> None:
        """Note the digests of a value and of all that it leads to."""
        waiting = [(name, root)]
        while waiting:
            path, value = waiting.pop()
            if len(self.digests) >= _MOST_VALUES:
                raise ValueError(f"the script can reach more than {_MOST_VALUES:,} values")
            if type(value) in _PLAIN:
                self.digests[path] = _digest(repr(value).encode())
                continue
            if id(value) in self._paths:
                self.digests[path] = f"same as {self._paths[id(value)]}"
                continue
            self._paths[id(value)] = path
            self._kept.append(value)
            own, parts = _parts(value)
            self.digests[path] = f"{type(value).__qualname__} {own}"
            waiting += [(f"{path}{name}", part) for name, part in reversed(list(parts))]


def _digest(data: Any) -> str:
    return f"{zlib.crc32(data):08x}"


def _of_bytes(array: Any) -> str:
    """Return the digest of an array's elements, without a copy if they lie in order."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)
    if flat.nbytes > _WHOLE_BYTES:
        flat = np.ascontiguousarray(flat[:: flat.nbytes // _SAMPLE_BYTES])
    return _digest(flat.data)


def _parts(value: Any) -> tuple[str, Iterator[tuple[str, Any]]]:
    """Return the digest of what is an object's own, and the named values that it leads to."""
    if isinstance(value, Tensor):
        return _tensor(value), iter([(".grad", value.grad)] if value.is_leaf else [])
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        about = f"{value.dtype} {value.shape}"
        if isinstance(value, np.memmap):  # as large as a disk
            return f"{about} {value.filename} {value.offset}", iter(())
        return f"{about} {_of_bytes(value)}", _attributes(value)
    if isinstance(value, dict):
        plain = all(type(key) in _PLAIN for key in value)
        keys = [f"[{key!r}]" if plain else f"[{n}]" for n, key in enumerate(value)]
        held = [] if plain else [(f" key {n}", key) for n, key in enumerate(value)]
        order = _digest(repr(keys).encode())
        return order, iter([*held, *zip(keys, list(dict.values(value)), strict=True), *_attributes(value)])
    if isinstance(value, (set, frozenset)):
        items = sorted(repr(one) for one in value if type(one) in _PLAIN)
        return f"{len(value)} {_digest(repr(items).encode())}", _attributes(value)
    if isinstance(value, (list, tuple, collections.deque)):
        items = list(value)
        if len(items) > 16 and all(type(one) in _PLAIN for one in items):
            return f"{len(items)} {_digest(repr(items).encode())}", _attributes(value)
        return str(len(items)), iter([*((f"[{n}]", one) for n, one in enumerate(items)), *_attributes(value)])
    return _other_parts(value)


def _tensor(value: Tensor) -> str:
    about = f"{value.dtype} {tuple(value.shape)} {value.device} {value.requires_grad}"
    if value.is_meta:
        return about
    local: Any = value
    if hasattr(type(value), "to_local"):  # a tensor that is spread over processes: the part of this one
        local = local.to_local()
    try:
        data = local.detach().cpu().to_dense().contiguous().view(-1).view(torch.uint8).numpy()
    except (RuntimeError, TypeError, NotImplementedError):  # a kind of tensor without plain memory
        return f"{about} {_digest(repr(value).encode())}"
    return f"{about} {_of_bytes(data)}"


def _other_parts(value: Any) -> tuple[str, Iterator[tuple[str, Any]]]:
    kind = type(value)
    if isinstance(value, types.FunctionType):
        cells = [
            (f" {name}", _content(cell))
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        ]
        return value.__qualname__, iter(
            [*cells, (" defaults", value.__defaults__), (" keywords", value.__kwdefaults__), *_attributes(value)]
        )
    if isinstance(value, types.MethodType):
        return value.__func__.__qualname__, iter([(".__self__", value.__self__)])
    if isinstance(value, type):
        own = {n: one for n, one in vars(value).items() if not n.startswith("__") and not callable(one)}
        return value.__qualname__, iter(
            [(f".{n}", one) for n, one in own.items()] if value.__module__ == "__main__" else []
        )
    if isinstance(value, torch.Generator):
        return _tensor(value.get_state()), iter(())
    if isinstance(value, (types.ModuleType, os.PathLike)) or _module(kind).startswith(_LIBRARIES):
        return str(getattr(value, "__name__", "")), iter(())
    if isinstance(value, types.GeneratorType):
        held = {} if value.gi_frame is None else value.gi_frame.f_locals
        return str(value.gi_frame is None), iter(
            [(f" {n}", one) for n, one in held.items() if not n.startswith("_mezzo")]
        )
    if isinstance(value, _BaseDataLoaderIter):
        return str(value._num_yielded), iter([("._sampler_iter", value._sampler_iter)])
    if isinstance(value, weakref.ref):
        return "", iter([(" to", value())])
    if hasattr(kind, "set_postfix"):  # a progress bar
        return "", iter([(f".{n}", getattr(value, n, None)) for n in _BAR])
    if hasattr(kind, "fileno") and hasattr(kind, "tell"):
        return _position(value), iter(())
    return _copied(value)


def _copied(value: Any) -> tuple[str, Iterator[tuple[str, Any]]]:
    """Return an object's attributes, and what a copy of it would consist of if its class says so; of others only the type is known."""
    plain = hasattr(value, "__dict__") or any("__slots__" in vars(parent) for parent in type(value).__mro__)
    if plain and "__reduce__" not in {name for parent in type(value).__mro__[:-1] for name in vars(parent)}:
        return "", _attributes(value)
    try:
        reduced = value.__reduce_ex__(2)
    except Exception:  # an object that cannot be copied
        return "", _attributes(value)
    if isinstance(reduced, str):
        return reduced, iter(())
    parts = [(f" part {n}", one) for n, one in enumerate(reduced[1:]) if one is not None]
    return getattr(reduced[0], "__qualname__", ""), iter([*parts, *_attributes(value)])


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    held = getattr(value, "__dict__", None)
    if isinstance(held, dict) and held is not value:
        yield from ((f".{name}", one) for name, one in list(held.items()))
    for parent in type(value).__mro__:
        slots = vars(parent).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield f".{name}", getattr(value, name)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _position(file: Any) -> str:
    try:
        return f"{getattr(file, 'name', '')} {file.tell()}"
    except (OSError, ValueError):  # a terminal, or closed
        return ""


def _module(kind: type) -> str:
    return str(kind.__module__) + "."


# Set-up makes its own settings again. The format of matrix products (TF32) is not among them: the run's policy sets it.

_CUDNN: Any = torch.backends.cudnn
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch.get_default_dtype()": (
        lambda: str(torch.get_default_dtype()).removeprefix("torch."),
        lambda name: torch.set_default_dtype(getattr(torch, name)),
    ),
    "torch.get_default_device()": (lambda: str(torch.get_default_device()), torch.set_default_device),
    "torch.are_deterministic_algorithms_enabled()": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "torch.is_anomaly_enabled()": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "torch.get_num_threads()": (torch.get_num_threads, torch.set_num_threads),
    "torch.backends.cudnn.benchmark": (lambda: _CUDNN.benchmark, lambda on: setattr(_CUDNN, "benchmark", on)),
    "torch.backends.cudnn.deterministic": (
        lambda: _CUDNN.deterministic,
        lambda on: setattr(_CUDNN, "deterministic", on),
    ),
    "numpy.geterr()": (np.geterr, lambda handling: np.seterr(**handling)),
    "decimal.getcontext().prec": (
        lambda: decimal.getcontext().prec,
        lambda digits: setattr(decimal.getcontext(), "prec", digits),
    ),
    "sys.getrecursionlimit()": (sys.getrecursionlimit, sys.setrecursionlimit),
    "gc.isenabled()": (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    "os.getcwd()": (os.getcwd, os.chdir),
}


def settings_now() -> dict[str, Any]:
    """Return each setting as numbers and texts."""
    return {name: get() for name, (get, _) in _SETTINGS.items()}


def changed_since(before: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from ``before``."""
    return {name: value for name, value in settings_now().items() if value != before[name]}


def apply_settings(settings: dict[str, Any]) -> None:
    """Make settings as ``settings_now`` returned them."""
    for name, value in settings.items():
        _SETTINGS[name][1](value)
