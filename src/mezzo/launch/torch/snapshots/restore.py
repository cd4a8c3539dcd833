"""Create the objects of a snapshot, and give those that set-up has made again their saved states, in place.

First every row gets its object: an existing one, or an empty new one. Then the states follow, so that cycles need no order: dicts and sets
after what their keys consist of, and iterators and passes over loaders last, because they look into other objects.
"""

from __future__ import annotations

import collections
import functools
import importlib
import io
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mezzo.engine.snapshots.secret_texts import SecretTexts
from mezzo.errors import SnapshotError
from mezzo.launch.torch.snapshots.arrays import (
    fill_array,
    fill_masked,
    fill_random,
    new_array,
    new_masked,
    new_view,
)
from mezzo.launch.torch.snapshots.iterators import new_iterator, reopen_pass
from mezzo.launch.torch.snapshots.known_types import NOT_SAVED, elements_of, items_of
from mezzo.launch.torch.snapshots.leaves import library_code, read_leaf
from mezzo.launch.torch.snapshots.rewriting import ITERATOR, OWN_NAMES
from mezzo.launch.torch.snapshots.script_files import OwnFiles
from mezzo.launch.torch.snapshots.source import FunctionPlace, place_of

_LATE = ("dict", "OrderedDict", "defaultdict", "Counter", "set", "variables", "weak dict", "weak set")
_AFTER = ("random", "bar")
_LAST = ("iterator", "pass")
_CONTAINERS: dict[str, type] = {
    "dict": dict, "OrderedDict": collections.OrderedDict, "defaultdict": collections.defaultdict, "Counter": collections.Counter,
    "list": list, "set": set, "deque": collections.deque,
}  # fmt: skip


class _Lost(torch.autograd.Function):
    """The graph of a result that was computed before the snapshot: it is gone, and its backward pass says so."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise SnapshotError(
            "the script runs backward through a result that was computed before the snapshot, whose graph is not saved",
            hint="detach what is carried from one step to the next, or save with mezzo.Session",
        )


class Restoration:
    """The objects of a snapshot, as far as they have been created."""

    def __init__(
        self,
        files: OwnFiles,
        rows: Sequence[Any],
        tensors: Mapping[str, Tensor],
        present: Mapping[int, Any],
        lost: Callable[[int], SnapshotError],
    ) -> None:
        """Begin with the objects that set-up has made.

        Args:
            files: the script's files.
            rows: the table that ``Walk`` wrote.
            tensors: its tensors.
            present: objects of set-up by their numbers in the first run.
            lost: returns the error that set-up has not made an object.
        """
        self._files, self._rows, self._present, self._lost = files, rows, present, lost
        self.tensors = tensors
        """The tensors of the snapshot, by name."""
        self._objects: dict[int, Any] = {}
        self._storages: dict[str, Any] = {}
        self.frame_cells: dict[tuple[str, str], Any] = {}
        self.checksums: Mapping[int, int | None] = {}
        """Of the large arrays that set-up has made."""
        self.secrets = SecretTexts()
        """Those that set-up has."""
        self.begin_samplers: Callable[[Any, Any], None] = lambda loader, saved: None
        self.begin_generator: Callable[[Any, dict[str, Any], Any], Any] = lambda function, state, variables: None

    def value(self, ref: Any) -> Any:
        """Return the value of a reference, or of a leaf."""
        if not isinstance(ref, list):
            return (
                sys.intern(ref) if isinstance(ref, str) and ref.isidentifier() else ref
            )  # as the names and texts of code are
        if len(ref) == 1 and isinstance(ref[0], int):
            return self._object(ref[0])
        if ref[0] == "enum":
            members = self.value(ref[1])
            return members(self.value(ref[3])) if ref[2] is None else members[ref[2]]
        return self.secrets.read(ref) if ref[0] == "secret" else read_leaf(ref)

    def values(self, refs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of several references."""
        return {name: self.value(ref) for name, ref in refs.items()}

    def fill(self, begin: int, end: int, *, again: bool = False) -> None:
        """Create the objects of some rows, and give them their states; ``again`` without those that only move forward."""
        numbers = range(begin, end)
        for number in numbers:
            self._object(number)
        early = [n for n in numbers if self._rows[n][0] not in (*_LATE, *_AFTER, *_LAST)]
        late = [n for n in numbers if self._rows[n][0] in _LATE]
        last = [] if again else [n for n in numbers if self._rows[n][0] in _LAST]
        after = [n for n in numbers if self._rows[n][0] in _AFTER]
        for number in [*early, *late, *after, *reversed(last)]:  # an enumeration comes before the pass that it counts
            kind, base, state = self._rows[number]
            if not again and base in self.checksums and kind in ("tensor", "array"):
                self._refuse_other_data(base, state)
            fill = _FILL.get(kind)
            if fill is not None and state is not None:
                fill(self, self._objects[number], state)

    def _refuse_other_data(self, base: int, state: Any) -> None:
        """Raise if a large array that was not saved, because the loop had not changed it, is another one now."""
        if state.get("checksum") not in (None, self.checksums[base]):
            raise self._lost(base)

    def _object(self, number: int) -> Any:
        if number in self._objects:
            return self._objects[number]
        kind, base, state = self._rows[number]
        if base >= 0:
            if base not in self._present:
                raise self._lost(base)
            self._objects[number] = self._present[base]
        else:
            created = _CREATE[kind](self, state)
            self._objects[number] = created
        return self._objects[number]

    def _type(self, state: Any, *parents: Any) -> Any:
        """Return the class of a row; a forged file must not have any other function called."""
        cls = self.value(state["class"])
        if not (isinstance(cls, type) and any(issubclass(cls, parent) for parent in parents)):
            raise SnapshotError(
                f"a class of the snapshot is no {parents[0].__name__}", hint="resume from a file that Mezzo wrote"
            )
        return cls

    # --- creating --------------------------------------------------------------------------------------------------------

    def _plain(self, state: Any) -> Any:
        cls = self.value(state["class"])
        new = types.SimpleNamespace() if cls is types.SimpleNamespace else object.__new__(cls)
        if isinstance(new, torch.optim.Optimizer):  # torch and Mezzo hook the steps of what they see created
            torch.optim.Optimizer.__init__(new, [torch.nn.Parameter(torch.empty(0))], {})
        return new

    def _error(self, state: Any) -> Any:
        cls, arguments = self._type(state, BaseException), self.value(state["arguments"])
        create: Any = cls.__new__
        error = create(cls, *arguments)
        error.args = arguments
        return error

    def _container(self, kind: str, state: Any) -> Any:
        parent = _CONTAINERS[kind]
        cls: Any = self.value(state["class"]) if "class" in state else parent
        create: Any = parent.__new__
        new = create(cls)
        if kind == "deque":
            collections.deque.__init__(new, (), state["most"])
        if kind == "defaultdict":
            new.default_factory = self.value(state["factory"])
        return new

    def _tuple(self, state: Any) -> Any:
        cls = self.value(state["class"]) if "class" in state else tuple
        return tuple.__new__(cls, [self.value(one) for one in state["items"]])

    def _scalar(self, state: Any) -> Any:
        plain = self.value(state["value"])
        return type(plain).__new__(self._type(state, type(plain)), plain)

    def _frozenset(self, state: Any) -> Any:
        return frozenset(self.value(one) for one in state["items"])

    def _tensor(self, state: Any) -> Any:
        old = state.get("view of")
        storage = self._storage(state["storage"], state["device"]) if old is None else self.value(old).untyped_storage()
        new = torch.empty(0, dtype=read_leaf(state["format"]), device=storage.device)
        new.set_(storage, state["offset"], state["shape"], state["strides"])
        cls = self.value(state["class"]) if "class" in state else Tensor
        if not state["leaf"] and state["trains"]:
            return _Lost.apply(new.requires_grad_())
        if issubclass(cls, torch.nn.Parameter):
            made = torch.nn.Parameter(new, state["trains"])
            return made if cls is torch.nn.Parameter else made.as_subclass(cls)
        return (new if cls is Tensor else new.as_subclass(cls)).requires_grad_(state["trains"])

    def _shared_tensor(self, state: Any) -> Any:
        like = self.value(state["like"])
        return type(like)(self.value(state["part"]), like._spec, requires_grad=state["trains"])

    def _storage(self, name: str, device: str) -> Any:
        if name not in self._storages:
            self._storages[name] = self.tensors[name].to(device).clone().untyped_storage()
        return self._storages[name]

    def _function(self, state: Any) -> Any:
        code = self._files.code_at(self._files.path_of(state["file"]), FunctionPlace(*state["place"]))
        module = self._files.modules[state["module"]]
        return self._made(code, module.__dict__, state)

    def _library_function(self, state: Any) -> Any:
        place = FunctionPlace(*state["place"])
        code = library_code(state["module"], place)
        if code is None:
            raise SnapshotError(
                f"{state['module']} has no {place.name} any more", hint="resume with the libraries as they were"
            )
        return self._made(code, sys.modules[state["module"]].__dict__, state)

    def _made(self, code: types.CodeType, variables: dict[str, Any], state: Any) -> Any:
        cells = tuple(self.value(cell) for cell in state["closure"])
        made = types.FunctionType(code, variables, state.get("name", code.co_name), None, cells)
        made.__qualname__ = state.get("qualname", place_of(code).name)
        return made

    def _frame_cell(self, state: Any) -> Any:
        return self.frame_cells[state[0], state[1]]

    def _random(self, state: Any) -> Any:
        cls = self.value(state["class"])
        if "device" in state:
            return torch.Generator(state["device"])
        if "bits" in state:
            return np.random.Generator(self._type({"class": state["bits"]}, np.random.BitGenerator)())
        return np.random.RandomState() if cls is np.random.RandomState else random.Random.__new__(cls)

    def _weak_reference(self, state: Any) -> Any:
        to = self.value(state["to"])
        return weakref.ref(to if to is not None else _Gone())

    def _generator(self, state: Any) -> Any:
        if state.get("ended"):
            return iter(())
        made = self._function(state)
        code = made.__code__
        by_name = dict.fromkeys(code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount])
        variables = self.values(state["variables"])
        if state["number"] is None:
            wanted = [variables.get(name) for name in code.co_varnames[: code.co_argcount]]
            return made(*wanted, **{name: variables.get(name) for name in by_name})
        return self.begin_generator(lambda: made(*[None] * code.co_argcount, **by_name), state, variables)

    def _memory_file(self, state: Any) -> Any:
        return self._type(state, io.StringIO, io.BytesIO)()

    def _file(self, state: Any) -> Any:
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

    def _bar(self, state: Any) -> Any:
        held = self.values({name: state[name] for name in ("iterable", "total", "desc", "leave", "disable", "unit")})
        return self._type(state, importlib.import_module("tqdm.std").tqdm)(initial=self.value(state["n"]), **held)

    # --- filling ---------------------------------------------------------------------------------------------------------

    def attributes(self, value: Any, state: Any) -> None:
        """Set an object's attributes and slots."""
        if state.get("is its own attributes"):
            value.__dict__ = value
        held = self.value(state.get("attributes"))
        if held is not None and value.__dict__ is not held:
            if isinstance(value, types.SimpleNamespace):  # its dict cannot be replaced
                value.__dict__.update(held)
            else:
                object.__setattr__(value, "__dict__", held)
        for name, ref in state.get("slots", {}).items():
            new_value = self.value(ref)
            if getattr(value, name, _ABSENT) is not new_value:
                object.__setattr__(value, name, new_value)

    def _kept(self, ref: Any, present: Any) -> Any:
        """Return the value of a reference; of a hook that was left out, what is present."""
        if isinstance(ref, list) and len(ref) == 1 and self._rows[ref[0]][0] == "left out":
            return present if present is not None else _ABSENT
        return self.value(ref)

    def _fill_sequence(self, value: Any, state: Any) -> None:
        if isinstance(value, (tuple, frozenset)):
            return
        items = [self.value(one) for one in state["items"]]
        if isinstance(value, list):
            list.__setitem__(value, slice(None), items)
        elif isinstance(value, set):
            set.clear(value)
            set.update(value, items)
        else:
            value.clear()
            value.extend(items)
        if "class" in state:
            self.attributes(value, state)

    def _fill_dict(self, value: Any, state: Any) -> None:
        pairs = [(self.value(key), ref) for key, ref in state["pairs"]]
        ordered = isinstance(value, collections.OrderedDict)
        parent: Any = collections.OrderedDict if ordered else dict
        new = [(key, one) for key, ref in pairs if (one := self._kept(ref, dict.get(value, key))) is not _ABSENT]
        # Else its own keys stay: a pickle shows which texts are one object.
        if [key for key, _ in new] != [key for key, _ in items_of(value)]:
            parent.clear(value)
        for key, one in new:
            parent.__setitem__(value, key, one)
        if isinstance(value, collections.defaultdict):
            value.default_factory = self.value(state["factory"])
        if "class" in state:
            self.attributes(value, state)

    def _fill_variables(self, value: Any, state: Any) -> None:
        """Set a module's variables; its own names, and the iterators of loops that are not open, stay."""
        new = {self.value(key): ref for key, ref in state["pairs"]}
        for name in [*value]:
            if name.startswith(ITERATOR) and name not in new:
                value[name] = None
            elif name not in new and name not in NOT_SAVED and not name.startswith(OWN_NAMES):
                del value[name]
        for name, ref in new.items():
            one = self._kept(ref, value.get(name))
            if one is not _ABSENT:
                value[name] = one

    @torch.no_grad()
    def _fill_tensor(self, value: Any, state: Any) -> None:
        if "data" in state:
            saved = self.tensors[state["data"]]
            own = elements_of(value)
            if saved.shape == own.shape and saved.dtype is value.dtype:
                own.copy_(saved)
            else:
                value.data = saved.to(value.device)
        if state["leaf"] and value.is_leaf:
            if value.requires_grad != state["trains"]:
                value.requires_grad_(state["trains"])
            value.grad = self.value(state["grad"])
        value.__dict__.update(self.values(state.get("attributes", {})))

    def _fill_shared(self, value: Any, state: Any) -> None:
        value.grad = self.value(state["grad"])

    def _fill_objects(self, value: Any, state: Any) -> None:
        flat = value.reshape(-1)
        for n, ref in enumerate(state["items"]):
            flat[n] = self.value(ref)

    def _fill_function(self, value: Any, state: Any) -> None:
        value.__defaults__, value.__kwdefaults__ = self.value(state["defaults"]), self.value(state["by name"])
        value.__dict__.update(self.values(state["attributes"]))

    def _fill_cell(self, value: Any, state: Any) -> None:
        if "value" in state:
            value.cell_contents = self.value(state["value"])

    def _fill_class(self, value: Any, state: Any) -> None:
        for name, ref in state.items():
            new = self.value(ref)
            if vars(value).get(name, _ABSENT) is not new:
                setattr(value, name, new)

    def _fill_bar(self, value: Any, state: Any) -> None:
        for name in ("iterable", "n", "postfix"):
            setattr(value, name, self.value(state[name]))

    def _fill_weak(self, value: Any, state: Any) -> None:
        value.clear()
        if "items" in state:
            value.update(self.value(one) for one in state["items"])
        else:
            for key, one in state["pairs"]:
                value[self.value(key)] = self.value(one)

    def _fill_iterator(self, value: Any, state: Any) -> None:
        if "at" in state:
            value.__setstate__(self.value(state["at"]))

    def _fill_pass(self, value: Any, state: Any) -> None:
        loaded = {name: self.value(state[name]) for name in ("loader", "began", "first", "samplers")}
        stream = {"stream": self.value(state["stream"]), "ended": state["ended"]} if "stream" in state else {}
        reopen_pass(value, loaded | stream | {"delivered": state["delivered"]}, self.begin_samplers)

    def _fill_memory_file(self, value: Any, state: Any) -> None:
        text = self.value(state["text"])
        if text is None:
            value.close()
            return
        value.seek(0)
        value.truncate()
        value.write(text)
        value.seek(state["at"])

    def _fill_file(self, value: Any, state: Any) -> None:
        if state["closed"] and not value.closed:
            value.close()


class _Gone:
    """The referent of a reference to nothing."""


_ABSENT = object()
R = Restoration
_CREATE: dict[str, Callable[[Restoration, Any], Any]] = {
    "object": R._plain,
    **{
        kind: functools.partial(lambda restoration, state, kind: restoration._container(kind, state), kind=kind)
        for kind in _CONTAINERS
    },
    "error": R._error,
    "bytearray": lambda restoration, state: bytearray(),
    "tuple": R._tuple,
    "frozenset": R._frozenset,
    "tensor": R._tensor,
    "shared tensor": R._shared_tensor,
    "array": new_array,
    "array view": new_view,
    "scalar": R._scalar,
    "masked": new_masked,
    "objects": lambda _, state: np.empty(state["shape"], dtype=object),
    "function": R._function,
    "library function": R._library_function,
    "cell": lambda _, state: types.CellType(),
    "frame cell": R._frame_cell,
    "method": lambda restoration, state: types.MethodType(
        restoration.value(state["function"]), restoration.value(state["of"])
    ),
    "builtin method": lambda restoration, state: getattr(restoration.value(state["of"]), state["name"]),
    "partial": lambda r, state: functools.partial(
        r.value(state["function"]), *r.value(state["arguments"]), **r.values(state["by name"])
    ),
    "random": R._random,
    "system random": lambda restoration, state: restoration._type(state, random.SystemRandom)(),
    "weak reference": R._weak_reference,
    "weak dict": lambda r, state: r._type(state, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)(),
    "weak set": lambda r, state: r._type(state, weakref.WeakSet)(),
    "bar": R._bar,
    "iterator": lambda restoration, state: new_iterator(
        state["by"], [restoration.value(one) for one in state["arguments"]]
    ),
    "generator": R._generator,
    "pass": lambda restoration, state: (cls := restoration.value(state["class"])).__new__(cls),
    "memory file": R._memory_file,
    "file": R._file,
    "lock": lambda _, state: threading.RLock() if state["reentrant"] else threading.Lock(),
    "left out": lambda _, state: None,
}
_FILL: dict[str, Callable[[Restoration, Any, Any], None]] = {
    "object": R.attributes,
    "error": R.attributes,
    "bytearray": lambda restoration, value, state: value.__setitem__(slice(None), restoration.value(state["bytes"])),
    **dict.fromkeys(("dict", "OrderedDict", "defaultdict", "Counter"), R._fill_dict),
    **dict.fromkeys(("list", "set", "deque", "tuple", "frozenset"), R._fill_sequence),
    "variables": R._fill_variables,
    "tensor": R._fill_tensor,
    "shared tensor": R._fill_shared,
    "array": fill_array,
    "masked": fill_masked,
    "scalar": R.attributes,
    "objects": R._fill_objects,
    "function": R._fill_function,
    "library function": R._fill_function,
    "cell": R._fill_cell,
    "class": R._fill_class,
    "random": fill_random,
    "bar": R._fill_bar,
    "weak dict": R._fill_weak,
    "weak set": R._fill_weak,
    "iterator": R._fill_iterator,
    "pass": R._fill_pass,
    "memory file": R._fill_memory_file,
    "file": R._fill_file,
}
