"""The kinds of objects that can be saved, and Python's own: containers, objects of classes, files, locks, progress bars."""

from __future__ import annotations

import collections
import functools
import importlib
import io
import os
import random
import threading
import types
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data.dataloader import _BaseDataLoaderIter

from mezzo.engine.casts.conversion import OwnForward
from mezzo.engine.matrix_units.block_linear import LayerPlan
from mezzo.launch.torch.snapshots import arrays, functions
from mezzo.launch.torch.snapshots.known_types import (
    ABSENT,
    NOT_SAVED,
    STATELESS,
    Described,
    Parts,
    has_address_hash,
    is_of_process,
    is_opaque,
    is_plain,
    items_of,
    key_name,
)
from mezzo.launch.torch.snapshots.rewriting import ITERATOR, OWN_NAMES
from mezzo.launch.torch.snapshots.script_files import OwnFiles
from mezzo.launch.torch.snapshots.walk import ObjectKind, RowParts, Saver, Savers, Turn, Walk

# --- objects ---------------------------------------------------------------------------------------------------------------


def _object(walk: Walk, value: Any) -> Described:
    return "object", walk.attributes(value)


def _new_object(state: RowParts) -> Any:
    cls = state["class"]
    new = types.SimpleNamespace() if cls is types.SimpleNamespace else object.__new__(cls)
    if isinstance(new, torch.optim.Optimizer):  # torch and Mezzo hook the steps of what they see created
        torch.optim.Optimizer.__init__(new, [torch.nn.Parameter(torch.empty(0))], {})
    return new


def set_attributes(value: Any, state: RowParts) -> None:
    """Set an object's attributes and slots."""
    if state.get("is its own attributes"):
        value.__dict__ = value
    held = state.get("__dict__")
    if held is not None and value.__dict__ is not held:
        if isinstance(value, types.SimpleNamespace):  # its dict cannot be replaced
            value.__dict__.update(held)
        else:
            object.__setattr__(value, "__dict__", held)
    for name, one in state.get("slots", {}).items():
        if getattr(value, name, ABSENT) is not one:
            object.__setattr__(value, name, one)


def _error(walk: Walk, value: Any) -> Described:
    return "error", walk.attributes(value) | {"arguments": value.args}


def _new_error(state: RowParts) -> Any:
    create: Any = state.type(BaseException).__new__
    error = create(state["class"], *state["arguments"])
    error.args = state["arguments"]
    return error


_SCALARS: dict[type, Any] = {
    int: int.__int__,
    float: float.__float__,
    complex: lambda value: complex(value.real, value.imag),
    str: str.__str__,
    bytes: lambda value: bytes(memoryview(value)),
}
"""Types whose subclasses are saved by their value and their attributes, and what returns the value."""


def _scalar(walk: Walk, value: Any) -> Described:
    plain = next(plain for parent, plain in _SCALARS.items() if isinstance(value, parent))
    return "scalar", walk.attributes(value) | {"value": plain(value)}


def _new_scalar(state: RowParts) -> Any:
    plain = state["value"]
    return type(plain).__new__(state.type(type(plain)), plain)


# --- containers ------------------------------------------------------------------------------------------------------------

_DICTS: tuple[type, ...] = (collections.OrderedDict, collections.defaultdict, collections.Counter, dict)
_SEQUENCES: tuple[type, ...] = (list, tuple, set, frozenset, collections.deque)
_CONTAINERS = {one.__name__: one for one in (*_DICTS, *_SEQUENCES)}


def _own_class(walk: Walk, value: Any, kind: type) -> Parts:
    return {} if type(value) is kind and kind is not collections.OrderedDict else walk.attributes(value)


def _sequence(walk: Walk, value: Any) -> Described:
    kind = next(one for one in _SEQUENCES if isinstance(value, one))
    parts: Parts = {"items": walk.items(value)}
    if kind in (set, frozenset):
        _refuse_order(walk, value)
    if isinstance(value, collections.deque):
        parts["most"] = value.maxlen
    return kind.__name__, parts | _own_class(walk, value, kind)


def _refuse_order(walk: Walk, value: Any) -> None:
    """Refuse a set that alone leads to objects of set-up whose order follows from their addresses: they have no place."""
    if walk.base is None or not walk.is_old:
        return
    numbers = [walk.base.ids.get(id(one), -1) for one in value if has_address_hash(one)]
    if sum(n >= 0 and walk.base.links[n][0] == walk.rows[walk.now][1] for n in numbers) > 1:
        raise walk.refusal(value, "the order of its objects is another one in each process; keep them in a list, too")


def _dict(walk: Walk, value: Any) -> Described:
    is_module = any(value is module.__dict__ for module in walk.files.modules.values())
    values, names = list[Any](), list[str]()
    for n, (key, one) in enumerate(list(items_of(value))):
        is_own = is_module and (key in NOT_SAVED or (key.startswith(OWN_NAMES) and key not in walk.keeps))
        if not is_own and not is_of_process(key):
            values += [key, one]
            names += [f"key {n}", key_name(key)]
    parts: Parts = {"items": walk.items(values, names)}
    if is_module:
        return "variables", parts
    kind = next(one for one in _DICTS if isinstance(value, one))
    if kind is collections.defaultdict:
        parts["default_factory"] = value.default_factory
    return kind.__name__, parts | _own_class(walk, value, kind)


def _new_container(state: RowParts) -> Any:
    parent = _CONTAINERS[state.kind]
    create: Any = parent.__new__
    new = create(state.get("class", parent), *([state["items"]] if state.kind in ("tuple", "frozenset") else []))
    if state.kind == "deque":
        collections.deque.__init__(new, (), state["most"])
    return new


def _fill_sequence(value: Any, state: RowParts) -> None:
    if isinstance(value, list):
        list.__setitem__(value, slice(None), state["items"])
    elif isinstance(value, set):
        items = state["items"]
        set.clear(value)
        set.update(value, items)
    elif isinstance(value, collections.deque):
        items = state["items"]
        value.clear()
        value.extend(items)
    if "class" in state:
        set_attributes(value, state)


def _pairs(state: RowParts) -> list[tuple[Any, Any]]:
    """Return the keys of a dict with the references to their values."""
    _, *refs = state.parts["items"]
    return [(state.restoration.value(key), ref) for key, ref in zip(refs[::2], refs[1::2], strict=True)]


def _fill_dict(value: Any, state: RowParts) -> None:
    kept = state.restoration.kept
    new = [(key, one) for key, ref in _pairs(state) if (one := kept(ref, dict.get(value, key))) is not ABSENT]
    parent: Any = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
    # Else its own keys stay: a pickle shows which texts are one object.
    if [key for key, _ in new] != [key for key, _ in items_of(value)]:
        parent.clear(value)
    for key, one in new:
        parent.__setitem__(value, key, one)
    if isinstance(value, collections.defaultdict):
        value.default_factory = state["default_factory"]
    if "class" in state:
        set_attributes(value, state)


def _fill_variables(value: Any, state: RowParts) -> None:
    """Set a module's variables; its own names, and the iterators of loops that are not open, stay."""
    new = dict(_pairs(state))
    for name in [*value]:
        if name.startswith(ITERATOR) and name not in new:
            value[name] = None
        elif name not in new and name not in NOT_SAVED and not name.startswith(OWN_NAMES):
            del value[name]
    for name, ref in new.items():
        one = state.restoration.kept(ref, value.get(name))
        if one is not ABSENT:
            value[name] = one


def _weak_container(walk: Walk, value: Any) -> Described:
    if isinstance(value, weakref.WeakSet):
        _refuse_order(walk, value)
        return "weak set", {"class": type(value), "items": walk.items(value)}
    held = [one for pair in value.items() for one in pair]
    return "weak dict", {"class": type(value), "items": walk.items(held)}


def _fill_weak_set(value: Any, state: RowParts) -> None:
    value.clear()
    value.update(state["items"])


def _fill_weak_dict(value: Any, state: RowParts) -> None:
    value.clear()
    items = state["items"]
    value.update(zip(items[::2], items[1::2], strict=True))


# --- files and progress bars -----------------------------------------------------------------------------------------------

_MEMORY_FILES: tuple[Any, ...] = (io.StringIO, io.BytesIO)


def _file(walk: Walk, value: Any) -> Described:
    if isinstance(value, _MEMORY_FILES):
        return "memory file", {"class": type(value), "state": None if value.closed else value.__getstate__()}
    if value.closed or walk.is_old:
        return "file", {"closed": value.closed}
    name = getattr(value, "name", None)
    if not isinstance(value, (io.TextIOWrapper, io.BufferedIOBase)) or not isinstance(name, str):
        raise walk.refusal(value)
    if value.writable():
        value.flush()
    about = {"mode": getattr(value, "mode", "r"), "encoding": getattr(value, "encoding", None), "at": value.tell()}
    return "file", {"closed": False, "path": os.path.abspath(name), **about}


def _new_file(state: RowParts) -> Any:
    if state["closed"]:
        closed = io.StringIO()
        closed.close()
        return closed
    mode = state["mode"].translate(str.maketrans({"w": "r+", "x": "r+", "a": "r+"})).replace("++", "+")
    file = open(state["path"], mode, **({} if "b" in mode else {"encoding": state["encoding"]}))  # noqa: SIM115
    file.seek(state["at"])
    if file.writable():
        file.truncate()
    return file


def _fill_file(value: Any, state: RowParts) -> None:
    if state["closed"] and not value.closed:
        value.close()


def _fill_memory_file(value: Any, state: RowParts) -> None:
    if state["state"] is None:
        value.close()
    else:
        value.__setstate__(state["state"])


_BAR = ("iterable", "total", "desc", "leave", "disable", "unit")
"""What ``tqdm`` is called with."""


def _bar(walk: Walk, value: Any) -> Described:
    return "bar", {"class": type(value)} | {name: getattr(value, name, None) for name in (*_BAR, "postfix", "n")}


def _new_bar(state: RowParts) -> Any:
    cls = state.type(importlib.import_module("tqdm.std").tqdm)
    return cls(initial=state["n"], **{name: state[name] for name in _BAR})


def _fill_bar(value: Any, state: RowParts) -> None:
    for name in ("iterable", "n", "postfix"):
        setattr(value, name, state[name])


# --- the table -------------------------------------------------------------------------------------------------------------

_RLOCK = type(threading.RLock())
_EXACT: dict[type, Saver] = {
    types.FunctionType: functions.function,
    types.CellType: functions.cell,
    types.MethodType: functions.method,
    types.BuiltinMethodType: functions.builtin_method,
    types.MethodWrapperType: functions.builtin_method,
    types.GeneratorType: functions.generator,
    functools.partial: functions.partial,
    OwnForward: functions.own_forward,
    LayerPlan: functions.layer_plan,
    weakref.ref: lambda walk, value: ("weak reference", {"to": value()}),
    **dict.fromkeys((weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet), _weak_container),
    type(threading.Lock()): lambda walk, value: functions.call(walk, "Lock", {}),
    _RLOCK: lambda walk, value: functions.call(walk, "RLock", {}),
    **dict.fromkeys(functions.ITERATOR_TYPES, functions.iterator),
    functions.TqdmIterator: _object,
    functions.OwnIterator: _object,
}
_GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
_DERIVED: list[tuple[Any, Saver]] = [
    (Tensor, arrays.tensor),
    (_DICTS, _dict),
    (_SEQUENCES, _sequence),
    (bytearray, lambda walk, value: ("bytearray", {"bytes": bytes(value)})),
    (np.ndarray, arrays.array),
    (_GENERATORS, arrays.random_generator),
    (type, functions.own_class),
    (_BaseDataLoaderIter, functions.loader_pass),
    (io.IOBase, _file),
    (threading.Thread, lambda walk, value: walk.unchanged(value, "threads cannot be saved")),
]


@functools.cache
def saver_of(kind: type) -> Saver:
    """Return what describes objects of a type."""
    if kind in _EXACT:
        return _EXACT[kind]
    if any(parent.__module__.split(".")[0] == "tqdm" and hasattr(kind, "set_postfix") for parent in kind.__mro__):
        return _bar
    for parents, saver in _DERIVED:
        if issubclass(kind, parents):
            return saver
    if not is_opaque(kind):
        if issubclass(kind, tuple(_SCALARS)):
            return _scalar
        if is_plain(kind) or kind is types.SimpleNamespace:
            return _object
        if issubclass(kind, BaseException):
            return _error
        if not issubclass(kind, STATELESS):
            return lambda walk, value: walk.unknown(value)
    return lambda walk, value: walk.unchanged(value)


def is_replaced(value: Any, files: OwnFiles) -> bool:
    """Return whether an object is made anew in a resumed run, because its position cannot be set in place."""
    if isinstance(value, types.GeneratorType):
        return files.has(value.gi_code)
    return type(value) in functions.POSITIONS or isinstance(value, _BaseDataLoaderIter)


_TABLE: dict[str, ObjectKind] = {
    "object": ObjectKind(_new_object, set_attributes),
    "error": ObjectKind(_new_error, set_attributes),
    "scalar": ObjectKind(_new_scalar, set_attributes),
    **{one.__name__: ObjectKind(_new_container, _fill_dict, Turn.LATE) for one in _DICTS},
    **dict.fromkeys(("list", "deque", "tuple", "frozenset"), ObjectKind(_new_container, _fill_sequence)),
    "set": ObjectKind(_new_container, _fill_sequence, Turn.LATE),
    "variables": ObjectKind(fill=_fill_variables, turn=Turn.LATE),
    "bytearray": ObjectKind(
        lambda state: bytearray(), lambda value, state: value.__setitem__(slice(None), state["bytes"])
    ),
    "weak dict": ObjectKind(
        lambda state: state.type(weakref.WeakKeyDictionary, weakref.WeakValueDictionary)(), _fill_weak_dict, Turn.LATE
    ),
    "weak set": ObjectKind(lambda state: state.type(weakref.WeakSet)(), _fill_weak_set, Turn.LATE),
    "memory file": ObjectKind(lambda state: state.type(*_MEMORY_FILES)(), _fill_memory_file),
    "file": ObjectKind(_new_file, _fill_file),
    "bar": ObjectKind(_new_bar, _fill_bar, Turn.AFTER),
    "opaque": ObjectKind(),
    "left out": ObjectKind(),
}
KINDS = _TABLE | arrays.KINDS | functions.KINDS
"""By the names that rows have."""
SAVERS = Savers(saver_of, is_replaced)
