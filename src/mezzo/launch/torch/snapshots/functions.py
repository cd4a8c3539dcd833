"""Functions in snapshots: their variables, and the code that they are made of again; and what is made by calling a known function."""

from __future__ import annotations

import enum
import functools
import gc
import inspect
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Mapping
from typing import Any

from mezzo.errors import SnapshotError
from mezzo.launch.torch.snapshots.known_types import ABSENT, Described, Parts, library_code
from mezzo.launch.torch.snapshots.rewriting import OWN_NAMES, FunctionPlace, place_of
from mezzo.launch.torch.snapshots.walk import Kind, State, Walk

_OF_ITERTOOLS = "chain cycle islice count repeat accumulate starmap takewhile dropwhile zip_longest product"
CALLED: dict[str, Any] = {
    **{name: getattr(itertools, name) for name in _OF_ITERTOOLS.split()},
    **{one.__name__: one for one in (iter, enumerate, zip, map, filter, reversed, getattr, functools.partial)},
    **{"method": types.MethodType, "Lock": threading.Lock, "RLock": threading.RLock},
}
"""What may be called to make an object again."""


def call(walk: Walk, by: str, arguments: Mapping[str, Any], named: Mapping[str, Any] | None = None) -> Described:
    """Describe an object by a call that makes it again; the arguments have the names by which it leads to them."""
    return "call", {"by": by, "arguments": walk.items(arguments.values(), arguments), "named": walk.named(named or {})}


def called(state: State) -> Any:
    """Return the result of a call."""
    return CALLED[state["by"]](*state["arguments"], **state["named"])


def method(walk: Walk, value: Any) -> Described:
    """Describe a bound method."""
    return call(walk, "method", {"__func__": value.__func__, "__self__": value.__self__})


def builtin_method(walk: Walk, value: Any) -> Described:
    """Describe a bound method of C code."""
    return call(walk, "getattr", {"__self__": value.__self__, "name": value.__name__})


def partial(walk: Walk, value: Any) -> Described:
    """Describe a ``functools.partial``."""
    arguments = {f"[{n}]": one for n, one in enumerate(value.args)}
    return call(walk, "partial", {"func": value.func, **arguments}, value.keywords)


# --- functions and classes -------------------------------------------------------------------------------------------------


def function(walk: Walk, value: Any) -> Described:
    """Describe a function of the script, or one that a library has made."""
    code = value.__code__
    place = place_of(code)
    module = value.__globals__.get("__name__")
    if walk.files.has(code):
        kind, about = "function", _home(walk, code, value.__globals__)
    else:
        top = place.name.split(".<locals>")[0]
        if not walk.is_old and library_code(module, place) is None:
            raise walk.refusal(value, f"nothing named {top} leads to it")
        kind, about = "library function", {"module": module, "place": walk.items(place)}
    return kind, about | {
        "name": value.__name__,
        "qualname": value.__qualname__,
        "closure": walk.items(value.__closure__ or (), code.co_freevars),
        "__defaults__": value.__defaults__,
        "__kwdefaults__": value.__kwdefaults__,
        "attributes": walk.named(value.__dict__),
    }


def _home(walk: Walk, code: types.CodeType, variables: dict[str, Any]) -> Parts:
    """Return where a function of the script comes from."""
    file, module = walk.files.name_of(code.co_filename), walk.files.module_of(variables)
    return {"file": file, "module": module, "place": walk.items(place_of(code))}


def _new_function(state: State) -> Any:
    files, place = state.restoration.files, FunctionPlace(*state["place"])
    code: types.CodeType | None
    if state.kind == "library function":
        code, module = library_code(state["module"], place), sys.modules.get(state["module"])
    else:
        code, module = files.code_at(files.path_of(state["file"]), place), files.modules[state["module"]]
    if code is None or module is None:
        raise SnapshotError(
            f"{state['module']} has no {place.name} any more", hint="resume with the libraries as they were"
        )
    made = types.FunctionType(code, module.__dict__, state.get("name", code.co_name), None, tuple(state["closure"]))
    made.__qualname__ = state.get("qualname", place.name)
    return made


def _fill_function(value: Any, state: State) -> None:
    value.__defaults__, value.__kwdefaults__ = state["__defaults__"], state["__kwdefaults__"]
    value.__dict__.update(state["attributes"])


def cell(walk: Walk, value: Any) -> Described:
    """Describe a variable that several functions share."""
    try:
        return "cell", {"cell": value.cell_contents}
    except ValueError:  # not assigned yet
        return "cell", {}


def _fill_cell(value: Any, state: State) -> None:
    if "cell" in state:
        value.cell_contents = state["cell"]


_DESCRIPTORS = (
    *(types.FunctionType, types.MemberDescriptorType, types.GetSetDescriptorType),
    *(staticmethod, classmethod, property),
)


def own_class(walk: Walk, value: Any) -> Described:
    """Describe a class of the script by its attributes."""
    if not walk.files.is_own(value.__module__):
        return walk.unchanged(value)
    if not walk.is_old:
        raise walk.refusal(value, "its class statement ran inside the loop")
    if isinstance(value, enum.EnumMeta):
        return "opaque", {}
    held = {
        name: one
        for name, one in vars(value).items()
        if not (name.startswith("__") and name.endswith("__")) and not name.startswith("_abc_")
    }
    return "class", {"attributes": walk.named({n: one for n, one in held.items() if not isinstance(one, _DESCRIPTORS)})}


def _fill_class(value: Any, state: State) -> None:
    for name, new in state["attributes"].items():
        if vars(value).get(name, ABSENT) is not new:
            setattr(value, name, new)


# --- generators ------------------------------------------------------------------------------------------------------------


def generator(walk: Walk, value: Any) -> Described:
    """Describe a generator of the script by its variables; where it is follows from its frame."""
    code, frame = value.gi_code, value.gi_frame
    if frame is None:
        return "generator", {"ended": True}
    has_begun = inspect.getgeneratorstate(value) != inspect.GEN_CREATED
    if not walk.files.has(code) or code.co_name.startswith("<"):
        if walk.is_old and not has_begun:
            return "opaque", {}
        raise walk.refusal(value, f"it runs {code.co_qualname}, whose position cannot be restored")
    if value.gi_yieldfrom is not None or code.co_cellvars:
        raise walk.refusal(value, f"{code.co_qualname} is inside yield from, or has functions of its own")
    if has_begun:
        walk.generators.append(value)
    cells = [one for one in gc.get_referents(value) if type(one) is types.CellType]
    free = code.co_freevars
    held = {
        n: v
        for n, v in frame.f_locals.items()
        if n not in free and (not n.startswith(OWN_NAMES) or n.startswith(OWN_NAMES[0]))
    }
    return "generator", {
        **_home(walk, code, frame.f_globals),
        "begun": has_begun,
        "closure": walk.items(cells[-len(free) or 10**9 :], free),
        "variables": walk.named(held),
    }


def _new_generator(state: State) -> Any:
    if state.get("ended"):
        return iter(())
    made = _new_function(state)
    code, variables = made.__code__, state["variables"] if not state["begun"] else {}
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    values = {name: variables.get(name) for name in names}
    new = made(*[values.pop(name) for name in names[: code.co_argcount]], **values)
    if state["begun"]:
        state.restoration.move_generator(new, state)
    return new


class _Gone:
    """The referent of a reference to nothing."""


KINDS: dict[str, Kind] = {
    "call": Kind(called),
    "function": Kind(_new_function, _fill_function),
    "library function": Kind(_new_function, _fill_function),
    "cell": Kind(lambda state: types.CellType(), _fill_cell),
    "frame cell": Kind(lambda state: state.restoration.frame_cells[state["frame"], state["name"]]),
    "class": Kind(fill=_fill_class),
    "generator": Kind(_new_generator),
    "weak reference": Kind(lambda state: weakref.ref(_Gone() if state["to"] is None else state["to"])),
}
