"""Values that need no identity: written as JSON, read back equal and of the same type.

JSON's own notation is kept for None, booleans, texts, floats and integers of a usual size; all others are lists that begin with a tag.
A list with a single number is a reference to an object (``walk``). Types, functions and modules are looked up by name. A module that only
the loop had imported is imported again, so a forged file can run what importing an installed module runs.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import fractions
import importlib
import inspect
import io
import pathlib
import re
import sys
import types
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mezzo.errors import SnapshotError

NOT_A_LEAF = object()
_SMALL = 2**63

_TEXTS: dict[type, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    torch.dtype: (lambda v: str(v).removeprefix("torch."), lambda t: getattr(torch, t)),
    torch.layout: (lambda v: str(v).removeprefix("torch."), lambda t: getattr(torch, t)),
    torch.memory_format: (lambda v: str(v).removeprefix("torch."), lambda t: getattr(torch, t)),
    torch.device: (str, torch.device),
    datetime.datetime: (lambda v: v.isoformat(), datetime.datetime.fromisoformat),
    datetime.date: (lambda v: v.isoformat(), datetime.date.fromisoformat),
    datetime.time: (lambda v: v.isoformat(), datetime.time.fromisoformat),
    datetime.timedelta: (lambda v: f"{v.days} {v.seconds} {v.microseconds}", lambda t: _timedelta(t)),
    decimal.Decimal: (str, decimal.Decimal),
    fractions.Fraction: (str, fractions.Fraction),
    uuid.UUID: (str, uuid.UUID),
    pathlib.PosixPath: (str, pathlib.PosixPath),
    pathlib.PurePosixPath: (str, pathlib.PurePosixPath),
}
_TEXT_TYPES = {kind.__name__: (kind, read) for kind, (_, read) in _TEXTS.items()}
_SINGLE = {"...": ..., "NotImplemented": NotImplemented}
_FUNCTIONS = (
    types.BuiltinFunctionType,
    types.FunctionType,
    type(np.add),
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)


def _timedelta(text: str) -> datetime.timedelta:
    days, seconds, microseconds = map(int, text.split())
    return datetime.timedelta(days=days, seconds=seconds, microseconds=microseconds)


def written_leaf(value: Any) -> Any:
    """Return a value as JSON; ``NOT_A_LEAF`` if it is an object with an identity or of an unknown type."""
    kind = type(value)
    if value is None or kind is bool or kind is str or kind is float:
        return value
    if kind is int:
        return value if -_SMALL <= value < _SMALL else ["int", hex(value)]
    if kind is bytes:
        return ["bytes", base64.b64encode(value).decode()]
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind in (range, slice):
        parts = [written_leaf(part) for part in (value.start, value.stop, value.step)]
        return NOT_A_LEAF if NOT_A_LEAF in parts else [kind.__name__, *parts]
    if kind is torch.Size:
        return ["Size", *value]
    if kind in _TEXTS:
        if getattr(value, "tzinfo", None) is not None and value.tzinfo is not datetime.timezone.utc:
            return NOT_A_LEAF
        return ["text", kind.__name__, _TEXTS[kind][0](value)]
    if isinstance(value, np.dtype):
        return NOT_A_LEAF if value.hasobject else ["np.dtype", _descr(value)]
    if isinstance(value, np.generic) and kind.__module__ == "numpy" and not value.dtype.hasobject:
        return ["np", _descr(value.dtype), base64.b64encode(value.tobytes()).decode()]
    if kind is re.Pattern:
        pattern = written_leaf(value.pattern)
        return ["re", pattern, value.flags]
    return _named(value, kind)


def _named(value: Any, kind: type) -> Any:
    """Return what is found again by its name: functions, types and modules of libraries, and the standard streams."""
    if value is ... or value is NotImplemented:
        return ["single", str(value) if value is NotImplemented else "..."]
    if isinstance(value, io.IOBase) and value in (sys.stdin, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        return ["single", str(getattr(value, "name", "")).strip("<>")]
    if kind is types.ModuleType:
        name = str(value.__name__)
        return ["module", name] if sys.modules.get(name) is value else NOT_A_LEAF
    if isinstance(value, (type, *_FUNCTIONS)):
        module, name = (
            getattr(value, "__module__", None),
            getattr(value, "__qualname__", getattr(value, "__name__", "")),
        )
        module = module or getattr(getattr(value, "__objclass__", None), "__module__", None) or "builtins"
        return ["name", module, name] if _found(sys.modules.get(module), name) is value else NOT_A_LEAF
    return NOT_A_LEAF


def _descr(dtype: Any) -> Any:
    return np.lib.format.dtype_to_descr(dtype) if dtype.kind != "V" or dtype.names else dtype.str


def _as_descr(descr: Any) -> Any:
    """Return a NumPy description that went through JSON, which has no tuples."""
    if isinstance(descr, list):
        return [tuple(_as_descr(part) if n == 1 else _tuple(part) for n, part in enumerate(row)) for row in descr]
    return descr


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def written_dtype(dtype: Any) -> Any:
    """Return a NumPy format as JSON."""
    return _descr(dtype)


def read_dtype(descr: Any) -> Any:
    """Return a NumPy format."""
    return np.lib.format.descr_to_dtype(_as_descr(descr))


def _module(name: str) -> Any:
    """Return a module; one that the loop imported is imported again, if it is installed."""
    try:
        return sys.modules.get(name) or importlib.import_module(name)
    except ImportError:
        return None


def _found(module: Any, name: str) -> Any:
    """Return what a module has by that name; None if it has nothing."""
    found = module
    for part in name.split("."):
        if found is None or part == "<locals>":
            return None
        found = inspect.getattr_static(found, part, None) if isinstance(found, type) else getattr(found, part, None)
        found = getattr(found, "__func__", found) if isinstance(found, staticmethod) else found
    return found


def read_leaf(written: list[Any]) -> Any:
    """Return the value of a list with a tag.

    Raises:
        SnapshotError: the script has not imported what it names.
        ValueError, TypeError, LookupError: it is no result of ``written_leaf``.
    """
    tag, *rest = written
    if tag == "int":
        return int(rest[0], 16)
    if tag == "bytes":
        return base64.b64decode(rest[0], validate=True)
    if tag == "complex":
        return complex(*rest)
    if tag in ("range", "slice"):
        parts = [read_leaf(part) if isinstance(part, list) else part for part in rest]
        return range(*parts) if tag == "range" else slice(*parts)
    if tag == "Size":
        return torch.Size(rest)
    if tag == "text":
        return _TEXT_TYPES[rest[0]][1](rest[1])
    if tag == "np.dtype":
        return read_dtype(rest[0])
    if tag == "np":
        return np.frombuffer(base64.b64decode(rest[1], validate=True), read_dtype(rest[0]))[0]
    if tag == "re":
        return re.compile(read_leaf(rest[0]) if isinstance(rest[0], list) else rest[0], rest[1])
    if tag == "single":
        return getattr(sys, rest[0]) if rest[0].startswith("std") else _SINGLE[rest[0]]
    if tag == "module":
        return _module(rest[0])
    if tag == "name":
        found = _found(_module(rest[0]), rest[1])
        if found is None:
            raise SnapshotError(
                f"the script no longer has {rest[0]}.{rest[1]}",
                hint="resume with the script and the libraries as they were",
            )
        return found
    raise ValueError(f"unknown kind of value {str(tag)[:40]!r}")
