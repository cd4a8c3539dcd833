"""Functions and iterators in snapshots: variables, the code that functions are made of again, and the positions of iterators."""

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
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from mezzo.engine.casts.conversion import OwnForward
from mezzo.engine.matrix_units.block_linear import LayerPlan
from mezzo.engine.matrix_units.low_layers import plan_of
from mezzo.engine.randomness import random_states, set_random_states
from mezzo.engine.snapshots.position import generators_of, skip_batches
from mezzo.errors import NotSavable, SnapshotError
from mezzo.launch.patches import Patches
from mezzo.launch.torch.snapshots.known_types import ABSENT, Described, Parts, library_code
from mezzo.launch.torch.snapshots.rewriting import OWN_NAMES, FunctionPlace, place_of
from mezzo.launch.torch.snapshots.walk import ObjectKind, RowParts, Turn, Walk

_OF_ITERTOOLS = "chain cycle islice count repeat accumulate starmap takewhile dropwhile zip_longest product"
CALLED: dict[str, Any] = {
    **{name: getattr(itertools, name) for name in _OF_ITERTOOLS.split()},
    **{one.__name__: one for one in (iter, enumerate, zip, map, filter, reversed, getattr, functools.partial)},
    **{"method": types.MethodType, "Lock": threading.Lock, "RLock": threading.RLock},
    **{"OwnForward": OwnForward, "LayerPlan": plan_of},
}
"""What may be called to make an object again."""


def call(walk: Walk, by: str, arguments: Mapping[str, Any], named: Mapping[str, Any] | None = None) -> Described:
    """Describe an object by a call that makes it again; the arguments have the names by which it leads to them."""
    return "call", {"by": by, "arguments": walk.items(arguments.values(), arguments), "named": walk.named(named or {})}


def called(state: RowParts) -> Any:
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


def own_forward(walk: Walk, value: OwnForward) -> Described:
    """Describe the forward of a module that Mezzo has wrapped."""
    return call(walk, "OwnForward", {"module": value.module})


def layer_plan(walk: Walk, value: LayerPlan) -> Described:
    """Describe how a layer computes in blocks."""
    kept = {f"[{n}]": product for n, product in enumerate(sorted(value.in_16_bits))}
    return call(walk, "LayerPlan", {"policy": value.policy, **kept})


def function(walk: Walk, value: Any) -> Described:
    """Describe a function of the script, or made by a library."""
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


def _new_function(state: RowParts) -> Any:
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


def _fill_function(value: Any, state: RowParts) -> None:
    value.__defaults__, value.__kwdefaults__ = state["__defaults__"], state["__kwdefaults__"]
    value.__dict__.update(state["attributes"])


def cell(walk: Walk, value: Any) -> Described:
    """Describe a variable that several functions share."""
    try:
        return "cell", {"cell": value.cell_contents}
    except ValueError:  # not assigned yet
        return "cell", {}


def _fill_cell(value: Any, state: RowParts) -> None:
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


def _fill_class(value: Any, state: RowParts) -> None:
    for name, new in state["attributes"].items():
        if vars(value).get(name, ABSENT) is not new:
            setattr(value, name, new)


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


def _new_generator(state: RowParts) -> Any:
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


_EMPTY: list[Any] = [[], (), range(0), range(2**70), {}, {}.items(), {}.values(), set(), "", "é", b""]
_REVERSIBLE: list[Any] = [[], {}, {}.items(), {}.values()]
ITERATOR_TYPES: list[type] = [
    *(type(iter(one)) for one in _EMPTY),
    *(type(reversed(one)) for one in _REVERSIBLE),
    type(iter(int, 1)),
    *(one for name, one in CALLED.items() if isinstance(one, type) and hasattr(one, "__next__")),
]
_NAMES = {id(one): name for name, one in CALLED.items()}


def iterator(walk: Walk, value: Any) -> Described:
    """Describe one of Python's own iterators: what makes it again, and its position."""
    by, arguments, *at = value.__reduce__()
    name = _NAMES.get(id(by)) or type(value).__name__
    if name not in CALLED:
        raise walk.refusal(value)
    _, parts = call(walk, name, {f"[{n}]": one for n, one in enumerate(arguments)})
    return "iterator", parts | ({"at": at[0]} if at else {})


def _fill_iterator(value: Any, state: RowParts) -> None:
    if "at" in state:
        value.__setstate__(state["at"])


class TqdmIterator:
    """What ``tqdm.__iter__`` yields, as an object with a position instead of a generator."""

    def __init__(self, bar: Any) -> None:
        self.bar, self.iterator = bar, iter(bar.iterable)

    def __iter__(self) -> TqdmIterator:
        return self

    def __next__(self) -> Any:
        try:
            item = next(self.iterator)
        except StopIteration:
            self.bar.close()
            raise
        self.bar.update(1)
        return item


class OwnIterator:
    """An iterator of the script's own class: the loop must not call its ``__iter__`` once more, which may begin anew."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator

    def __iter__(self) -> OwnIterator:
        return self

    def __next__(self) -> Any:
        return next(self.iterator)


def iterator_of(iterable: Any) -> Iterator[Any]:
    """Return what a ``for`` statement would iterate over."""
    iterator = iter(iterable)
    is_own = isinstance(getattr(type(iterator), "__iter__", None), FunctionType)
    return (
        OwnIterator(iterator) if is_own and not isinstance(iterator, (_BaseDataLoaderIter, TqdmIterator)) else iterator
    )


POSITIONS = {*ITERATOR_TYPES, OwnIterator, TqdmIterator}
"""Iterators that are made anew at a position."""


def install_passes(patches: Patches, capture: Callable[[Any], Any]) -> None:
    """Keep, for each pass over a loader, what its order follows from, until ``patches`` are undone.

    Args:
        patches: what is changed in torch and tqdm.
        capture: returns the state of a loader's samplers, as JSON and tensors.
    """

    def deliver(original: Any, iterator: Any) -> Any:
        if iterator._mezzo_first is None:  # samplers begin at the first request
            iterator._mezzo_first = _states(iterator._mezzo_loader)
            iterator._mezzo_samplers = capture(iterator._mezzo_loader)
        return original(iterator)

    patches.around(_BaseDataLoaderIter, "__init__", _begin)
    patches.around(_BaseDataLoaderIter, "__next__", deliver)
    if "tqdm" in sys.modules:
        tqdm = sys.modules["tqdm.std"].tqdm

        patches.around(tqdm, "__iter__", lambda original, bar: TqdmIterator(bar))


def _states(loader: Any) -> dict[str, Any]:
    return {**random_states(), "loader": [generator.get_state() for generator in generators_of(loader)]}


def _set(states: dict[str, Any], loader: Any) -> None:
    set_random_states(states)
    for generator, state in zip(generators_of(loader), states["loader"], strict=True):
        generator.set_state(state)


def _begin(original: Any, iterator: Any, loader: Any) -> None:
    iterator._mezzo_loader, iterator._mezzo_began = loader, _states(loader)
    iterator._mezzo_first = iterator._mezzo_samplers = None
    original(iterator, loader)


def loader_pass(walk: Walk, value: Any) -> Described:
    """Describe a pass over a loader: how it began, and how many batches it has delivered."""
    if getattr(value._mezzo_loader, "persistent_workers", False):
        raise NotSavable(
            "a DataLoader has persistent_workers=True: the random generators of its workers cannot be read",
            hint="pass persistent_workers=False",
        )
    parts: Parts = {name: getattr(value, f"_mezzo_{name}") for name in ("loader", "began", "first", "samplers")}
    parts |= {"delivered": value._num_yielded, "class": type(value)}
    fetcher: Any = getattr(value, "_dataset_fetcher", None)
    stream = getattr(fetcher, "dataset_iter", None)
    return "pass", parts | ({} if stream is None else {"stream": stream, "ended": fetcher.ended})


def _reopen(shell: Any, state: RowParts) -> None:
    """Turn an empty iterator into the pass that was saved: begun again, and moved to its position."""
    loader: DataLoader[Any] = state["loader"]
    delivered, samplers, first = state["delivered"], state["samplers"], state["first"]
    state.restoration.set_samplers(loader, samplers)
    _set(state["began"], loader)
    type(shell).__init__(shell, loader)
    if first is not None:
        if not hasattr(shell, "_workers"):
            state.restoration.set_samplers(loader, samplers)
            _set(first, loader)
        if "stream" in state:
            shell._dataset_fetcher.dataset_iter, shell._dataset_fetcher.ended = state["stream"], state["ended"]
            shell._num_yielded = delivered
        elif skip_batches(shell, delivered) < delivered:
            raise SnapshotError(
                f"the DataLoader has fewer than the {delivered} batches that it had delivered",
                hint="resume with the same script, the same arguments and the same data",
            )
        shell._mezzo_first, shell._mezzo_samplers = first, samplers


KINDS: dict[str, ObjectKind] = {
    "call": ObjectKind(called),
    "function": ObjectKind(_new_function, _fill_function),
    "library function": ObjectKind(_new_function, _fill_function),
    "cell": ObjectKind(lambda state: types.CellType(), _fill_cell),
    "frame cell": ObjectKind(lambda state: state.restoration.frame_cells[state["frame"], state["name"]]),
    "class": ObjectKind(fill=_fill_class),
    "generator": ObjectKind(_new_generator),
    "weak reference": ObjectKind(lambda state: weakref.ref(_Gone() if state["to"] is None else state["to"])),
    "iterator": ObjectKind(called, _fill_iterator, Turn.LAST),
    "pass": ObjectKind(lambda state: state.type(_BaseDataLoaderIter).__new__(state["class"]), _reopen, Turn.LAST),
}
