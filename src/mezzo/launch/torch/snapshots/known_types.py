"""What is known of the types that a script's objects have: which have no state, which are made of attributes, and their bytes.

A kind is how objects of some types are saved and restored. A saver returns the kind's name and the parts of an object: values, which the
walk replaces by JSON and references. ``make`` creates an object from them, and ``fill`` gives them to an existing object.
"""

from __future__ import annotations

import collections
import csv
import importlib
import inspect
import io
import math
import re
import sys
import types
import weakref
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mezzo.engine.snapshots.kinds import VALUE_KINDS, VALUES, dtype_text, make_scalar, numpy_dtype, scalar_parts
from mezzo.errors import SnapshotError
from mezzo.launch.torch.snapshots.rewriting import FunctionPlace, codes_in, place_of

Parts = dict[str, Any]
Described = tuple[str, Parts]
"""The name of an object's kind, and its parts."""
ABSENT = object()
"""What stands for a value that is not there."""


class Ready(NamedTuple):
    """A part that is JSON already."""

    json: Any


NOT_SAVED = {
    *("__builtins__", "__spec__", "__loader__", "__cached__", "__file__", "__package__", "__name__", "__doc__"),
    *("__annotations__", "__warningregistry__"),
}
"""Names of a module that Python itself gives it."""
OPAQUE = (
    "mezzo", "torch._dynamo", "torch._inductor", "torch._functorch", "torch.fx", "torch._C", "torch.distributed", "torch.jit",
    "torch.cuda",
    "torch.autograd", "torch.utils._", "torch.utils.tensorboard", "tensorboard", "tensorboardX", "wandb", "mlflow", "logging", "_thread",
    "concurrent", "importlib", "_frozen_importlib", "asyncio", "contextlib", "_io", "unittest", "warnings", "_contextvars", "typing", "abc",
    "_abc", "dataclasses", "inspect", "ast", "weakref",
)  # fmt: skip
"""Libraries whose objects a loop does not change in a way that a resumed run would miss, and types without a state."""
_TRAINED = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler)
_VALUES_OF = "wandb.sdk.data_types"
"""Modules of these libraries whose objects are values, such as histograms."""
_SMALL_BYTES = 4096
"""Smaller arrays are saved without a look at whether they changed."""


STATELESS = (
    types.CodeType, types.ModuleType, types.FrameType, types.TracebackType, types.GenericAlias, types.MappingProxyType,
    property, staticmethod, classmethod, types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodDescriptorType,
    types.WrapperDescriptorType, types.ClassMethodDescriptorType, type(np.add), type(int | str), type(csv.writer(io.StringIO())),
    weakref.ProxyType, weakref.CallableProxyType,
)  # fmt: skip
"""Types whose objects have no state that a loop changes."""


def checksum(value: Any) -> int | None:
    """Return a checksum of an array's elements; None if it is small, or not to be read."""
    if value.nbytes <= _SMALL_BYTES:
        return None
    try:
        if isinstance(value, Tensor):
            value = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    except Exception:  # a type that NumPy has no bytes for: it is saved each time
        return None


def bytes_of(array: Any) -> Tensor:
    """Return the bytes of a NumPy array as a tensor."""
    return (
        torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8)
        if array.nbytes
        else torch.empty(0, dtype=torch.uint8)
    )


def elements_of(value: Tensor) -> Tensor:
    """Return a tensor's elements, each once, as a plain tensor over the same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        plain = value.detach()
        plain = plain if type(plain) is Tensor else plain.as_subclass(Tensor)
        for dim, stride in enumerate(plain.stride()):
            if stride == 0 and plain.shape[dim] > 1:  # expanded: all along this dimension are one element
                plain = plain.narrow(dim, 0, 1)
        return plain


def items_of(value: dict[Any, Any]) -> Any:
    """Return the items of a dict in its order, which an ``OrderedDict`` keeps by itself; a class's own ``items`` is not called."""
    return collections.OrderedDict.items(value) if isinstance(value, collections.OrderedDict) else dict.items(value)


def slots_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object's slots that have a value."""
    for one in type(value).__mro__:
        names = one.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            full = f"_{one.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            if name not in ("__dict__", "__weakref__"):
                try:
                    yield full, object.__getattribute__(value, full)
                except AttributeError:
                    continue


def is_plain(kind: type) -> bool:
    """Return whether objects of a class consist of their attributes: no class of C code is among its parents."""
    for parent in kind.__mro__[:-1]:
        is_heap = parent.__flags__ & (1 << 9)
        if not is_heap or not (
            "__dict__" in parent.__dict__
            or ("__module__" in parent.__dict__ and hasattr(parent, "__weakref__"))
            or "__slots__" in parent.__dict__
        ):
            return False
    return kind.__basicsize__ <= object.__basicsize__ + 8 * (
        4 + sum(len(getattr(p, "__slots__", ())) for p in kind.__mro__)
    )


def is_opaque(kind: type) -> bool:
    """Return whether objects of a class belong to a library whose objects stay as set-up makes them, and training changes none."""
    module = str(kind.__module__)
    return not (issubclass(kind, _TRAINED) or module.startswith(_VALUES_OF)) and any(
        module == name or module.startswith(name if name.endswith("_") else f"{name}.") for name in OPAQUE
    )


def is_hook(function: Any) -> bool:
    """Return whether Mezzo or torch itself hangs the function into a script's objects."""
    module = str(getattr(function, "__module__", ""))
    return module.startswith(("mezzo.", "torch.distributed.", "torch._dynamo."))


def has_address_hash(value: Any) -> bool:
    """Return whether an object's place in a set follows from its address."""
    addresses: tuple[Any, ...] = (object.__hash__, Tensor.__hash__)
    return type(value).__hash__ in addresses


def is_of_process(key: Any) -> bool:
    """Return whether an attribute's name is torch's own and another one in each process: ``fully_shard`` keeps its state under it."""
    return isinstance(key, str) and key.startswith("__composable_api")


def key_name(key: Any) -> str:
    """Return what a key is called in messages: a number may have more digits than Python prints."""
    return str(key) if isinstance(key, str) else f"[{key!r:.40}]" if not isinstance(key, int) else f"[{key:#x}]"[:40]


def samplers_of(loader: Any) -> dict[str, Any]:
    """Return a loader's samplers that are not torch's own, by names."""
    batches = getattr(loader, "batch_sampler", None)
    found = dict.fromkeys([getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)])
    own = [one for one in found if one is not None and not type(one).__module__.startswith("torch.utils.data")]
    return {f"sampler {number}": one for number, one in enumerate(own)}


# JSON's own notation is kept for None, booleans, texts, floats and integers of a usual size; all others are lists that begin with a tag.
# A list with a single number is a reference to an object (``walk``). Types, functions and modules are looked up by name. A module that only
# the loop had imported is imported again, so a forged file can run what importing an installed module runs.

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
    """Return a module; if the loop imported it, it is imported again, if installed."""
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
