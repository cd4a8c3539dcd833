"""Write what a script can reach as a table of objects, each once, with references between them.

A row is ``[kind, base, state]``. ``base`` is the number of an object that set-up creates again, at the same place in the walk (the same
attribute of the same object), and that is then changed in place: optimizers and closures hold it. It is -1 for a younger object, which is
created from its state. A reference is a list with the row's number. Rows come in the order of the frames that lead to them.

What a type of unknown C code holds cannot be read. Such an object, and one that belongs to Mezzo, is left as set-up makes it if it
is older than the loop, and refused by name if it is younger.
"""

from __future__ import annotations

import collections
import enum
import functools
import io
import os
import pickle
import random
import threading
import types
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data.dataloader import _BaseDataLoaderIter

from mezzo.engine.processes.shards import is_shared
from mezzo.engine.snapshots.memory import can_be_written
from mezzo.engine.snapshots.secret_texts import SecretTexts
from mezzo.errors import NotSavable, SnapshotError
from mezzo.launch.torch.snapshots.arrays import written_array, written_random
from mezzo.launch.torch.snapshots.iterators import (
    ITERATOR_TYPES,
    OwnIterator,
    TqdmIterator,
    written_iterator,
    written_pass,
)
from mezzo.launch.torch.snapshots.known_types import (
    NOT_SAVED,
    STATELESS,
    cells_of,
    checksum,
    elements_of,
    has_begun,
    is_hook,
    is_of_process,
    is_opaque,
    is_plain,
    items_of,
    key_name,
    slots_of,
)
from mezzo.launch.torch.snapshots.leaves import NOT_A_LEAF, library_code, written_leaf
from mezzo.launch.torch.snapshots.rewriting import ITERATOR, OWN_NAMES
from mezzo.launch.torch.snapshots.script_files import OwnFiles
from mezzo.launch.torch.snapshots.source import place_of


class Base(NamedTuple):
    """The objects that existed when the outermost loop was entered."""

    objects: list[Any]
    links: list[tuple[int, str]]
    """Of each object, where it was found first: the number of the object that leads to it, or -1, and under which name."""
    ids: dict[int, int]
    checksums: dict[int, int | None]
    limits: list[int]
    """How many objects the modules and the frames up to each one lead to."""
    storages: dict[tuple[str, int], int]
    """Tensors by their memory."""
    secrets: SecretTexts


class Walk:
    """The table of everything that was reached so far."""

    def __init__(
        self,
        files: OwnFiles,
        base: Base | None = None,
        *,
        limit: int = 0,
        keeps: Iterable[str] = (),
        checks: bool = True,
    ) -> None:
        """Begin with an empty table.

        Args:
            files: the script's files.
            base: the objects of set-up; None to find them.
            limit: how many of these still exist.
            keeps: names of iterators of the loops that are open.
            checks: whether to read large arrays, so that those that do not change need not be saved.
        """
        self._files, self._base, self._limit, self._keeps = files, base, limit, frozenset(keeps)
        self._checks = checks
        self.rows: list[list[Any]] = []
        self.tensors: dict[str, Tensor] = {}
        self.links: list[tuple[int, str]] = []
        self._linked: set[tuple[int, str]] = set()
        self.objects: list[Any] = []
        """Of each row, the object, so that no other one gets its id."""
        self.ids: dict[int, int] = {}
        self.checksums: dict[int, int | None] = {}
        self.storages: dict[tuple[str, int], int] = {}
        self.secrets = SecretTexts() if base is None else base.secrets
        self.frame_cells: dict[int, tuple[str, str]] = {}
        """Cells of the frames that a resumed run creates by calls."""
        self.opaque: set[int] = set()
        """Objects to leave out, by their ids."""
        self.lasting = True
        """Whether the variables that are walked through live longer than the innermost loop."""
        self.generators: list[types.GeneratorType[Any, Any, Any]] = []
        self._described = 0
        self._now = -1

    # --- the walk --------------------------------------------------------------------------------------------------------

    def modules(self) -> None:
        """Walk through the script's modules."""
        named = sorted(self._files.modules.items())
        self.variables({name: module.__dict__ for name, module in named}, "")

    def variables(self, variables: Mapping[str, Any], frame: str) -> dict[str, Any]:
        """Walk through variables and all that they lead to; return references to them."""
        self._now = -1
        kept = {n: v for n, v in variables.items() if not n.startswith(OWN_NAMES) or n in self._keeps}
        found = {name: self.ref(value, f"{frame} {name}".strip()) for name, value in kept.items()}
        while self._described < len(self.objects):
            self._now, self._described = self._described, self._described + 1
            value = self.objects[self._now]
            try:
                self.rows[self._now][0], self.rows[self._now][2] = self._described_state(value)
            except SnapshotError:
                raise
            except Exception as error:
                raise self.refusal(value, f"{type(error).__name__}: {str(error)[:100]}") from error
        return found

    def ref(self, value: Any, name: str) -> Any:
        """Return a value as JSON, or a reference to it; ``name`` is its name in the object that leads to it."""
        number = self.ids.get(id(value))
        if number is not None:
            return [number]
        if type(value) in (str, bytes):
            if self._base is None:
                self.secrets.note(value, name, f"{self.path(self._now)}.{name}")
            elif (secret := self.secrets.written(value)) is not None:
                return secret
        is_own = isinstance(value, (type, types.FunctionType)) and self._files.is_own(value.__module__)
        if not is_own:
            leaf = written_leaf(value)
            if leaf is not NOT_A_LEAF:
                return leaf
            if isinstance(value, enum.Enum):
                named = (
                    type(value).__members__.get(str(value.name)) is value
                )  # a combination of flags has no name of its own
                return ["enum", self.ref(type(value), "class"), value.name if named else None, value.value]
        number = self.ids[id(value)] = len(self.objects)
        base = -1 if self._base is None or self._is_replaced(value) else self._base.ids.get(id(value), -1)
        self.objects.append(value)
        while (self._now, name) in self._linked:  # such as a variable and an attribute of one function
            name += "'"
        self._linked.add((self._now, name))
        self.links.append((self._now, name))
        self.rows.append(["", base if base < self._limit else -1, None])
        return [number]

    def _is_replaced(self, value: Any) -> bool:
        """Return whether an object is made anew in a resumed run, because its position cannot be set in place."""
        if isinstance(value, types.GeneratorType):
            return self._files.has(value.gi_code)
        return type(value) in _POSITIONS or isinstance(value, _BaseDataLoaderIter)

    def path(self, number: int) -> str:
        """Return how the script reaches an object."""
        parts = list[str]()
        while number >= 0:
            number, name = self.links[number]
            parts.append(name)
        return ".".join(reversed(parts)).removeprefix("__main__.").replace(".__dict__", "").replace(".[", "[")

    def refusal(self, value: Any, why: str = "") -> NotSavable:
        """Return the error that an object cannot be saved."""
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        error = NotSavable(
            f"{self.path(self._now)!r} is a {kind}, which a snapshot cannot save{': ' if why else ''}{why}",
            hint="create it before the training loop, or train with mezzo.Session and its save",
        )
        error.lasting = self.lasting and ITERATOR not in self.path(self._now)
        return error

    # --- states ----------------------------------------------------------------------------------------------------------

    @property
    def is_base(self) -> bool:
        """Whether this walk finds the objects of set-up."""
        return self._base is None

    @property
    def is_old(self) -> bool:
        """Whether set-up makes the object that is described."""
        return self._base is None or self.rows[self._now][1] >= 0

    def _described_state(self, value: Any) -> tuple[str, Any]:
        """Return the kind and the state of an object."""
        kind = type(value)
        if id(value) in self.opaque:
            return "opaque", None
        if id(value) in self.frame_cells:
            return "frame cell", list(self.frame_cells[id(value)])
        if not self.is_old and kind in (types.FunctionType, types.MethodType) and is_hook(value):
            return self._left_out(value)
        if kind in _EXACT:
            return _EXACT[kind](self, value)
        if any(parent.__module__.split(".")[0] == "tqdm" and hasattr(value, "set_postfix") for parent in kind.__mro__):
            return self._bar(value)
        for parent, described in _DERIVED:
            if isinstance(value, parent):
                return described(self, value)
        if is_opaque(value):
            return self.opaque_state(value)
        for parent, plain in _SCALARS.items():
            if isinstance(value, parent):
                return "scalar", self.attributes(value) | {"value": self.ref(plain(value), "value")}
        if is_plain(kind) or kind is types.SimpleNamespace:
            return self._object(value)
        if isinstance(value, BaseException):
            return "error", self.attributes(value) | {"arguments": self.ref(value.args, "args")}
        if isinstance(value, STATELESS):
            return self.opaque_state(value)
        return self.unknown_state(value)

    def unknown_state(self, value: Any) -> tuple[str, Any]:
        """Describe an object of C code: set-up makes it again, if it is still what it was there."""
        try:
            now = zlib.crc32(pickle.dumps(value, 5))
        except Exception:  # whatever a library raises
            now = None
        if self._base is None:
            self.checksums[self._now] = now
        elif not self.is_old or now is None or self._base.checksums.get(self.rows[self._now][1]) != now:
            raise self.refusal(value, "" if now is not None else "its state cannot be read")
        return "opaque", None

    def opaque_state(self, value: Any) -> tuple[str, Any]:
        """Describe an object that stays as set-up makes it."""
        if self.is_old:
            return "opaque", None
        if type(value).__module__.split(".")[0] == "mezzo":
            return self._left_out(value)
        raise self.refusal(value)

    def _left_out(self, value: Any) -> tuple[str, Any]:
        """A hook that Mezzo or torch sets by itself: a resumed run keeps what is there under its name."""
        parent = self.links[self._now][0]
        if parent < 0 or self.rows[parent][0] not in _DICTS:
            raise self.refusal(value)
        return "left out", None

    def attributes(self, value: Any) -> dict[str, Any]:
        """Return references to an object's attributes and slots."""
        state: dict[str, Any] = {"class": self.ref(type(value), "class")}
        held = getattr(value, "__dict__", None)
        if held is value:
            state["is its own attributes"] = True
        elif type(held) is dict:
            state["attributes"] = self.ref(held, "__dict__")
        slots = {name: self.ref(one, name) for name, one in slots_of(value)}
        return state | ({"slots": slots} if slots else {})

    def _object(self, value: Any) -> tuple[str, Any]:
        return "object", self.attributes(value)

    def _sequence(self, value: Any) -> tuple[str, Any]:
        state: dict[str, Any] = {"items": [self.ref(one, f"[{n}]") for n, one in enumerate(list(value))]}
        kind = next(one for one in (list, tuple, set, frozenset, collections.deque) if isinstance(value, one))
        if kind in (set, frozenset):
            self._refuse_order(value)
        if isinstance(value, collections.deque):
            state["most"] = value.maxlen
        return kind.__name__, state | ({} if type(value) is kind else self.attributes(value))

    def _refuse_order(self, value: Any) -> None:
        """Refuse a set that alone leads to objects of set-up whose order follows from their addresses: they have no place."""
        if self._base is None or not self.is_old:
            return
        addresses: tuple[Any, ...] = (object.__hash__, Tensor.__hash__)
        by_address = [one for one in value if type(one).__hash__ in addresses]
        numbers = [self._base.ids.get(id(one), -1) for one in by_address]
        if sum(n >= 0 and self._base.links[n][0] == self.rows[self._now][1] for n in numbers) > 1:
            raise self.refusal(
                value, "the order of its objects is another one in each process; keep them in a list, too"
            )

    def _dict(self, value: Any) -> tuple[str, Any]:
        is_module = any(value is module.__dict__ for module in self._files.modules.values())
        pairs = [
            [self.ref(key, f"key {n}"), self.ref(one, key_name(key))]
            for n, (key, one) in enumerate(list(items_of(value)))
            if not is_of_process(key)
            and not (is_module and (key in NOT_SAVED or (key.startswith(OWN_NAMES) and key not in self._keeps)))
        ]
        state: dict[str, Any] = {"pairs": pairs}
        if is_module:
            return "variables", state
        kind = next(
            one
            for one in (collections.OrderedDict, collections.defaultdict, collections.Counter, dict)
            if isinstance(value, one)
        )
        if kind is collections.defaultdict:
            state["factory"] = self.ref(value.default_factory, "default_factory")
        exact = type(value) is kind
        return kind.__name__, state | ({} if exact and kind is not collections.OrderedDict else self.attributes(value))

    def _tensor(self, value: Tensor) -> tuple[str, Any]:
        if is_shared(value):
            return self._shared(value)
        if type(value).__module__.startswith(("torchao", "torch.masked", "torch.nested")) or value.is_quantized:
            return self.unknown_state(value)
        if not can_be_written(value.dtype):
            return self.unknown_state(value)
        if value.is_meta or value.is_conj() or value.is_neg() or value.is_nested or value.layout is not torch.strided:
            return self.unknown_state(value)
        leaf = value.is_leaf
        state: dict[str, Any] = {
            "grad": self.ref(value.grad if leaf else None, "grad"),
            "trains": value.requires_grad,
            "leaf": leaf,
        }
        if type(value) is not Tensor:
            state["class"] = self.ref(type(value), "class")
        held = {name: self.ref(one, name) for name, one in value.__dict__.items()}
        if held:
            state["attributes"] = held
        place = (str(value.device), value.untyped_storage().data_ptr())
        if self._base is None:
            self.storages.setdefault(place, self._now)
            if not value.requires_grad:
                self.note_checksum(value)
        elif self.is_old:
            state |= self.changed(value, lambda: elements_of(value))
        else:
            state |= self._storage(value, place)
        return "tensor", state

    def _shared(self, value: Any) -> tuple[str, Any]:
        """A tensor that is spread over processes: the part of this one; a younger one is spread like one of set-up."""
        state: dict[str, Any] = {"part": self.ref(value._local_tensor, "part"), "trains": value.requires_grad}
        state["grad"] = self.ref(value.grad if value.is_leaf else None, "grad")
        if self._base is None or self.is_old:
            return "shared tensor", state
        old = (one for one in self._base.objects[: self._limit] if isinstance(one, Tensor) and is_shared(one))
        like = next((one for one in old if one._spec == value._spec), None)  # type: ignore[attr-defined]
        if like is None:
            raise self.refusal(value, "no tensor of set-up is spread over the processes like it")
        return "shared tensor", state | {"like": self.ref(like, "like")}

    def _storage(self, value: Tensor, place: tuple[str, int]) -> dict[str, Any]:
        """Return the memory of a younger tensor, which others may share, and its place in it."""
        assert self._base is not None
        layout = {"format": written_leaf(value.dtype), "offset": value.storage_offset()}
        layout |= {"shape": list(value.shape), "strides": list(value.stride())}
        old = self._base.storages.get(place)
        if old is not None and old < self._limit and value.numel():
            return layout | {"view of": self.ref(self._base.objects[old], "base")}
        name = f"storage {place[0]} {place[1]}" if value.numel() else f"empty {self._now}"
        if name not in self.tensors:
            whole = torch.empty(0, dtype=torch.uint8, device=value.device)
            self.tensors[name] = whole.set_(value.untyped_storage())
        return layout | {"storage": name, "device": str(value.device)}

    def note_checksum(self, value: Any) -> None:
        """Keep the checksum of an array of set-up: one that does not change need not be saved."""
        self.checksums[self._now] = checksum(value) if self._checks else None

    def keep(self, tensor: Tensor) -> str:
        """Save a tensor with the object that is described, and return its name."""
        self.tensors[f"{self._now}"] = tensor
        return f"{self._now}"

    def changed(self, value: Any, copied: Callable[[], Tensor]) -> dict[str, Any]:
        """Return the name of an array's elements if they may have changed since the loop was entered."""
        assert self._base is not None
        before = self._base.checksums.get(self.rows[self._now][1])
        if before is not None and checksum(value) == before:
            return {"checksum": before}
        return {"data": self.keep(copied())}

    def _function(self, value: types.FunctionType) -> tuple[str, Any]:
        code = value.__code__
        if not self._files.has(code):
            return self._library_function(value)
        own = {"file": self._files.name_of(code.co_filename), "module": self._files.module_of(value.__globals__)}
        return "function", own | self._parts_of(value)

    def _library_function(self, value: types.FunctionType) -> tuple[str, Any]:
        top = place_of(value.__code__).name.split(".<locals>")[0]
        if not self.is_old and library_code(value.__globals__.get("__name__"), place_of(value.__code__)) is None:
            raise self.refusal(value, f"nothing named {top} leads to it")
        return "library function", {"module": value.__globals__.get("__name__"), "top": top} | self._parts_of(value)

    def _parts_of(self, value: types.FunctionType) -> dict[str, Any]:
        """Return what a function consists of, besides its file."""
        cells = zip(value.__closure__ or (), value.__code__.co_freevars, strict=True)
        return {
            "place": list(place_of(value.__code__)),
            "name": value.__name__,
            "qualname": value.__qualname__,
            "closure": [self.ref(cell, name) for cell, name in cells],
            "defaults": self.ref(value.__defaults__, "__defaults__"),
            "by name": self.ref(value.__kwdefaults__, "__kwdefaults__"),
            "attributes": {name: self.ref(one, name) for name, one in value.__dict__.items()},
        }

    def _cell(self, value: types.CellType) -> tuple[str, Any]:
        try:
            return "cell", {"value": self.ref(value.cell_contents, "cell")}
        except ValueError:
            return "cell", {}

    def _method(self, value: Any) -> tuple[str, Any]:
        return "method", {"of": self.ref(value.__self__, "__self__"), "function": self.ref(value.__func__, "__func__")}

    def _builtin_method(self, value: Any) -> tuple[str, Any]:
        return "builtin method", {"of": self.ref(value.__self__, "__self__"), "name": value.__name__}

    def _partial(self, value: Any) -> tuple[str, Any]:
        by_name = {name: self.ref(one, name) for name, one in value.keywords.items()}
        function, arguments = self.ref(value.func, "func"), self.ref(value.args, "args")
        return "partial", {"function": function, "arguments": arguments, "by name": by_name}

    def _class(self, value: Any) -> tuple[str, Any]:
        if not self._files.is_own(value.__module__):
            return self.opaque_state(value)
        if not self.is_old:
            raise self.refusal(value, "its class statement ran inside the loop")
        if isinstance(value, enum.EnumMeta):
            return "opaque", None
        held = {
            name: one
            for name, one in vars(value).items()
            if not (name.startswith("__") and name.endswith("__")) and not name.startswith("_abc_")
        }
        return "class", {name: self.ref(one, name) for name, one in held.items() if not isinstance(one, _DESCRIPTORS)}

    def _reference(self, value: Any) -> tuple[str, Any]:
        return "weak reference", {"to": self.ref(value(), "referent")}

    def _weak(self, value: Any) -> tuple[str, Any]:
        if isinstance(value, weakref.WeakSet):
            self._refuse_order(value)
            return "weak set", {
                "class": self.ref(type(value), "class"),
                "items": [self.ref(one, f"[{n}]") for n, one in enumerate(value)],
            }
        held = list(value.items())
        pairs = [[self.ref(key, f"key {n}"), self.ref(one, f"value {n}")] for n, (key, one) in enumerate(held)]
        return "weak dict", {"class": self.ref(type(value), "class"), "pairs": pairs}

    def _iterator(self, value: Any) -> tuple[str, Any]:
        return "iterator", written_iterator(value, self)

    def _generator(self, value: Any) -> tuple[str, Any]:
        if value.gi_frame is None:
            return "generator", {"ended": True}
        code, frame = value.gi_code, value.gi_frame
        if not self._files.has(code) or code.co_name.startswith("<"):
            if self.is_old and not has_begun(value):
                return "opaque", None
            raise self.refusal(value, f"it runs {code.co_qualname}, whose position cannot be restored")
        if value.gi_yieldfrom is not None or code.co_cellvars:
            raise self.refusal(value, f"{code.co_qualname} is inside yield from, or has functions of its own")
        number = None
        if frame.f_lasti >= 0 and has_begun(value):
            number = len(self.generators)
            self.generators.append(value)
        free = dict(zip(code.co_freevars, cells_of(value), strict=True))
        held = {
            n: v
            for n, v in frame.f_locals.items()
            if n not in free and (not n.startswith(OWN_NAMES) or n.startswith(OWN_NAMES[0]))
        }
        return "generator", {
            "file": self._files.name_of(code.co_filename), "place": list(place_of(code)), "number": number,
            "module": self._files.module_of(frame.f_globals),
            "closure": [self.ref(cell, name) for name, cell in free.items()], "variables": {n: self.ref(v, n) for n, v in held.items()},
        }  # fmt: skip

    def _loader_pass(self, value: Any) -> tuple[str, Any]:
        return "pass", written_pass(value, self)

    def _file(self, value: Any) -> tuple[str, Any]:
        if isinstance(value, (io.StringIO, io.BytesIO)):
            text = None if value.closed else value.getvalue()
            return "memory file", {
                "class": self.ref(type(value), "class"),
                "text": self.ref(text, "text"),
                "at": 0 if text is None else value.tell(),
            }
        if value.closed or self.is_old:
            return "file", {"closed": value.closed}
        name = getattr(value, "name", None)
        if not isinstance(value, (io.TextIOWrapper, io.BufferedIOBase)) or not isinstance(name, str):
            raise self.refusal(value)
        if value.writable():
            value.flush()
        encoding = getattr(value, "encoding", None)
        return "file", {
            "closed": False,
            "path": os.path.abspath(name),
            "mode": getattr(value, "mode", "r"),
            "encoding": encoding,
            "at": value.tell(),
        }

    def _lock(self, value: Any) -> tuple[str, Any]:
        return "lock", {"reentrant": type(value) is _RLOCK}

    def _bar(self, value: Any) -> tuple[str, Any]:
        held = {
            name: getattr(value, name, None)
            for name in ("iterable", "total", "desc", "leave", "disable", "unit", "postfix", "n")
        }
        return "bar", {
            "class": self.ref(type(value), "class"),
            **{name: self.ref(one, name) for name, one in held.items()},
        }

    def _thread(self, value: Any) -> tuple[str, Any]:
        if not self.is_old:
            raise self.refusal(value, "threads cannot be saved")
        return "opaque", None


_SCALARS: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    complex: lambda value: complex(value.real, value.imag),
    str: str.__str__,
    bytes: lambda value: bytes(memoryview(value)),
}
"""Types whose subclasses are saved by their value and their attributes, and what returns the value."""
_DICTS = ("dict", "OrderedDict", "defaultdict", "variables")
_POSITIONS = {*ITERATOR_TYPES, OwnIterator, TqdmIterator}
_RLOCK = type(threading.RLock())
_DESCRIPTORS = (
    types.FunctionType,
    staticmethod,
    classmethod,
    property,
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
)
_Described = Callable[[Walk, Any], tuple[str, Any]]
_EXACT: dict[type, _Described] = {
    types.FunctionType: Walk._function,
    types.CellType: Walk._cell,
    types.MethodType: Walk._method,
    types.BuiltinMethodType: Walk._builtin_method,
    types.MethodWrapperType: Walk._builtin_method,
    types.GeneratorType: Walk._generator,
    functools.partial: Walk._partial,
    weakref.ref: Walk._reference,
    weakref.WeakKeyDictionary: Walk._weak,
    weakref.WeakValueDictionary: Walk._weak,
    weakref.WeakSet: Walk._weak,
    type(threading.Lock()): Walk._lock,
    _RLOCK: Walk._lock,
    **dict.fromkeys(ITERATOR_TYPES, Walk._iterator),
    TqdmIterator: Walk._object,
    OwnIterator: Walk._object,
}
_DERIVED: list[tuple[Any, _Described]] = [
    (Tensor, Walk._tensor),
    (dict, Walk._dict),
    ((list, tuple, set, frozenset, collections.deque), Walk._sequence),
    (bytearray, lambda walk, value: ("bytearray", {"bytes": walk.ref(bytes(value), "bytes")})),
    (np.ndarray, written_array),
    ((torch.Generator, random.Random, np.random.RandomState, np.random.Generator), written_random),
    (type, Walk._class),
    (_BaseDataLoaderIter, Walk._loader_pass),
    (io.IOBase, Walk._file),
    (threading.Thread, Walk._thread),
]


def base_of(walk: Walk, limits: list[int]) -> Base:
    """Return the objects that a walk found."""
    return Base(walk.objects, walk.links, walk.ids, walk.checksums, limits, walk.storages, walk.secrets)
