"""Values that need no identity: written as JSON, read back equal and of the same type.

JSON's own notation is kept for None, booleans, texts, floats and integers of a usual size; all others are lists that begin with a tag.
A list with a single number is a reference to an object (``walk``). Types, functions and modules are looked up by name. A module that only
the loop had imported is imported again, so a forged file can run what importing an installed module runs.
"""

from __future__ import annotations

import importlib
import inspect
import io
import math
import re
import sys
import types
from typing import Any

import numpy as np

from mezzo.engine.snapshots.kinds import VALUE_KINDS, VALUES, dtype_text, make_scalar, numpy_dtype, scalar_parts
from mezzo.errors import SnapshotError
from mezzo.launch.torch.snapshots.rewriting import codes_in
from mezzo.launch.torch.snapshots.source import FunctionPlace, place_of

NOT_A_LEAF = object()
_SMALL = 2**63
_HALVES = re.compile("[\ud800-\udfff]")
"""Halves of characters: reading JSON joins two of them."""
_SINGLE = {"NotImplemented": NotImplemented, "masked": np.ma.masked}
_FUNCTIONS = (
    types.BuiltinFunctionType,
    types.FunctionType,
    type(np.add),
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)


def written_leaf(value: Any) -> Any:
    """Return a value as JSON; ``NOT_A_LEAF`` if it is an object with an identity or of an unknown type."""
    kind = type(value)
    if value is None or kind is bool or (kind is float and math.isfinite(value)):
        return value
    if kind is str and (value.isascii() or not _HALVES.search(value)):
        return value
    if kind is int and -_SMALL <= value < _SMALL:
        return value
    try:
        if kind in VALUE_KINDS:
            name, known = VALUE_KINDS[kind]
            return ["value", name, *map(_part, known.parts(value))]
        if isinstance(value, np.dtype):
            return ["np.dtype", dtype_text(value)]
        if isinstance(value, np.generic) and kind.__module__ == "numpy":
            return ["np", *scalar_parts(value)]
    except ValueError:  # it cannot be made again from these parts
        return NOT_A_LEAF
    if kind is re.Pattern:
        pattern = written_leaf(value.pattern)
        return ["re", pattern, value.flags]
    return _named(value, kind)


def _part(value: Any) -> Any:
    """Return a part of a value as JSON; ``ValueError`` if it is no leaf."""
    written = ["list", *map(_part, value)] if isinstance(value, list) else written_leaf(value)
    if written is NOT_A_LEAF:
        raise ValueError(type(value).__name__)
    return written


def _read_part(written: Any) -> Any:
    if not isinstance(written, list):
        return written
    return [_read_part(part) for part in written[1:]] if written[0] == "list" else read_leaf(written)


def _named(value: Any, kind: type) -> Any:
    """Return what is found again by its name: functions, types and modules of libraries, and the standard streams."""
    single = next((name for name, one in _SINGLE.items() if one is value), None)
    if single is not None:
        return ["single", single]
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


def library_code(module: Any, place: FunctionPlace) -> types.CodeType | None:
    """Return the code of a library's function, found from the name of the outermost function around it; None if it is not found."""
    found = _found(_module(module), place.name.split(".<locals>")[0]) if isinstance(module, str) else None
    while found is not None:
        found = getattr(found, "__func__", found)
        for code in codes_in(found.__code__) if isinstance(found, types.FunctionType) else ():
            if place_of(code) == place:
                return code
        found = getattr(found, "__wrapped__", None)
    return None


def read_leaf(written: list[Any]) -> Any:
    """Return the value of a list with a tag.

    Raises:
        SnapshotError: the script has not imported what it names.
        ValueError, TypeError, LookupError: it is no result of ``written_leaf``.
    """
    tag, *rest = written
    if tag == "value":
        return VALUES[rest[0]].make(*map(_read_part, rest[1:]))
    if tag == "np.dtype":
        return numpy_dtype(rest[0])
    if tag == "np":
        return make_scalar(*rest)
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
