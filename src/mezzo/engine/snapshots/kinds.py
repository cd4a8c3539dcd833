"""The types of values that a snapshot holds, each made anew from its parts: numbers, texts, dates, paths, tensors, arrays.

Reading a row calls one known constructor with parts that are such values again; no file can name another.

Values whose memory overlaps are written once, as one span of memory, and are views of one memory again when they are read. A value alone
is written densely, without the gaps of a slice; its order of dimensions is kept, since sums over a gradient depend on it.
"""

from __future__ import annotations

import array
import ast
import base64
import ctypes
import datetime
import decimal
import fractions
import math
import pathlib
import random
import struct
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_NATIVE = {np.dtype(code) for code in ["?", "b", "B", "h", "H", "i", "I", "l", "L", "e", "f", "d", "F", "D"]}
"""NumPy's formats that torch has as well; arrays of others are written as bytes."""
_LONGEST_DTYPE = 20_000
Entry = dict[str, Any]


class _View(NamedTuple):
    """A tensor or array, its entry in the tree, and the memory from ``low`` up to ``high`` that it lies in."""

    home: tuple[str, int]
    """Its device and, unless that is the host, its storage there."""
    low: int
    high: int
    value: Any
    entry: Entry
    place: str

    def layout(self) -> tuple[Any, ...]:
        return (self.low, str(self.value.dtype), tuple(self.value.shape), _strides(self.value))


class MemorySpans:
    """The memory of all tensors and arrays of a state."""

    def __init__(self) -> None:
        self._views: list[_View] = []
        self.tensors: dict[str, Tensor] = {}
        """By name, once ``finish`` has been called."""

    def add(self, value: Any, entry: Entry, place: str) -> Entry:
        """Note a tensor or array; ``finish`` completes its entry. Empty ones have no memory to share."""
        low, high = _bounds(value)
        home = ("cpu", 0)
        if isinstance(value, Tensor) and value.device.type != "cpu":
            home = (str(value.device), value.untyped_storage().data_ptr())
            entry["device"] = str(value.device)
        view = _View(home, low, high, value, entry, place)
        if low == high:
            self._dense(view)
        else:
            self._views.append(view)
        return entry

    def finish(self) -> dict[str, Tensor]:
        """Complete the entries noted since the last call, and return all tensors by name."""
        order = {id(view): number for number, view in enumerate(self._views)}
        groups: list[list[_View]] = []
        end, home = -1, None
        for view in sorted(self._views, key=lambda view: view[:3]):
            if view.home == home and view.low < end:
                groups[-1].append(view)
                end = max(end, view.high)
            else:
                groups.append([view])
                end, home = view.high, view.home
        for group in sorted(groups, key=lambda group: min(order[id(view)] for view in group)):
            self._write(sorted(group, key=lambda view: order[id(view)]))
        self._views = []
        return self.tensors

    def _write(self, group: list[_View]) -> None:
        first = group[0]
        if len({view.layout() for view in group}) == 1 and (_is_dense(first.value) or _has_gaps(first)):
            name = self._dense(first)
            for view in group[1:]:
                view.entry.update({**first.entry, **view.entry, "value": name})
            return
        low, high = min(view.low for view in group), max(view.high for view in group)
        span = _span(first.value, low, high)
        formats = {view.value.dtype for view in group}
        format = next(iter(formats)) if len(formats) == 1 else None
        if isinstance(format, torch.dtype) and low % format.itemsize == 0:
            span = span.view(format)
        name = self._name(first.place, span)
        for view in group:
            shape, at = list(view.value.shape), view.low - low
            if isinstance(view.value, np.ndarray):
                at += view.value.ctypes.data - view.low  # negative strides begin at the end
            strides = list(_strides(view.value))
            view.entry.update(value=name, dtype=dtype_text(view.value.dtype), shape=shape, strides=strides, at=at)

    def _dense(self, view: _View) -> str:
        value = view.value
        if isinstance(value, np.ndarray):
            dense = np.array(value, order="C", copy=True) if not value.flags.c_contiguous else value
            if value.dtype in _NATIVE:
                value = _tensor_of(dense)
            else:
                view.entry.update(dtype=dtype_text(value.dtype), shape=list(value.shape))
                value = torch.frombuffer(bytearray(dense.tobytes()) or bytearray(1), dtype=torch.uint8)[: dense.nbytes]
        view.entry["value"] = name = self._name(view.place, value)
        return name

    def _name(self, place: str, tensor: Tensor) -> str:
        name = place
        while name in self.tensors or name == "__metadata__":
            name += "'"
        self.tensors[name] = tensor
        return name


def _tensor_of(array: np.ndarray[Any, Any]) -> Tensor:
    """Return the array as a tensor over the same memory; torch would warn of a read-only array."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _span(value: Any, low: int, high: int) -> Tensor:
    """Return the bytes of memory from ``low`` up to ``high``, all of which belong to values that are alive."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        storage = value.untyped_storage()
        empty = torch.empty(0, dtype=torch.uint8, device=value.device)
        return empty.set_(storage, low - storage.data_ptr(), (high - low,), (1,))
    return torch.frombuffer((ctypes.c_uint8 * (high - low)).from_address(low), dtype=torch.uint8)


def _strides(value: Any) -> tuple[int, ...]:
    """Return the strides, of a tensor in elements and of an array in bytes."""
    return tuple(value.stride()) if isinstance(value, Tensor) else value.strides


def _bounds(value: Any) -> tuple[int, int]:
    if isinstance(value, Tensor):
        start, size, unit = value.data_ptr(), value.itemsize, value.itemsize
    else:
        start, size, unit = value.ctypes.data, value.itemsize, 1
    if not math.prod(value.shape) or not size:
        return start, start
    steps = [(length - 1) * stride * unit for length, stride in zip(value.shape, _strides(value), strict=True)]
    return start + sum(s for s in steps if s < 0), start + sum(s for s in steps if s > 0) + size


def _is_dense(value: Any) -> bool:
    return bool(value.is_contiguous() if isinstance(value, Tensor) else value.flags.c_contiguous)


def _has_gaps(view: _View) -> bool:
    return bool(view.high - view.low > math.prod(view.value.shape) * view.value.itemsize)


def dtype_text(dtype: Any) -> str:
    """Return the text of a format, torch's or NumPy's.

    Raises:
        ValueError: it would not come back the same: objects, texts of any length, formats of other libraries.
    """
    if isinstance(dtype, torch.dtype):
        return str(dtype).removeprefix("torch.")
    text = dtype.str if dtype.names is None else repr(np.lib.format.dtype_to_descr(dtype))
    if dtype.hasobject or dtype.metadata or len(text) > _LONGEST_DTYPE or numpy_dtype(text) != dtype:
        raise ValueError(str(dtype))
    return text


def numpy_dtype(text: str) -> np.dtype[Any]:
    """Return NumPy's format of a text of ``dtype_text``.

    Raises:
        ValueError: it is none, or one of Python objects.
    """
    if len(text) > _LONGEST_DTYPE:
        raise ValueError("a format of too many characters")
    descr: Any = ast.literal_eval(text) if text.startswith("[") else text
    dtype: Any = np.lib.format.descr_to_dtype(descr)
    if not isinstance(dtype, np.dtype) or dtype.hasobject:
        raise ValueError(f"no format of numbers: {text[:40]}")
    return dtype


def torch_dtype(text: str) -> torch.dtype:
    """Return torch's format of a text of ``dtype_text``."""
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no format {text[:40]!r}")
    return dtype


def _stored(entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    name = entry.get("value")
    if not isinstance(name, str) or name not in tensors:
        raise ValueError(f"no tensor {str(name)[:80]!r}")
    return tensors[name]


def _counts(value: Any, *, least: int = 0) -> list[int]:
    if not isinstance(value, list) or len(value) > 64 or not all(type(n) is int and least <= n < 2**48 for n in value):
        raise ValueError(f"no shape or strides: {str(value)[:40]}")
    return value


def read_tensor(entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a tensor from its entry, over the memory of the named one.

    Raises:
        ValueError: the entry names no such tensor, or memory outside it.
    """
    stored = _stored(entry, tensors)
    if "at" not in entry:
        return stored.detach()
    shape, strides, (at,) = _counts(entry["shape"]), _counts(entry["strides"]), _counts([entry["at"]])
    dtype, flat = torch_dtype(entry["dtype"]), stored.detach().contiguous()
    steps = (max(length - 1, 0) * stride for length, stride in zip(shape, strides, strict=True))
    if at % dtype.itemsize or at + (sum(steps) + 1) * dtype.itemsize > flat.nbytes:
        raise ValueError(
            f"a tensor of shape {shape} does not lie in the {flat.nbytes} bytes of {entry['value'][:80]!r}"
        )
    first = flat.storage_offset() * flat.itemsize + at
    if first % dtype.itemsize:
        raise ValueError(f"a tensor begins at byte {first}, inside an element")
    empty = torch.empty(0, dtype=dtype, device=flat.device)
    return empty.set_(flat.untyped_storage(), first // dtype.itemsize, shape, strides)


def read_array(entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """Return an array from its entry, like ``read_tensor``."""
    stored = _stored(entry, tensors).detach()
    if "dtype" not in entry:
        array = stored.numpy()
    else:
        data: Any = stored.contiguous().reshape(-1).view(torch.uint8).numpy()
        dtype, shape = numpy_dtype(entry["dtype"]), _counts(entry["shape"])
        strides = _counts(entry["strides"], least=-(2**48)) if "at" in entry else None
        (at,) = _counts([entry.get("at", 0)])
        if strides is None and math.prod(shape) * dtype.itemsize != data.nbytes:
            raise ValueError(f"an array of shape {shape} has not {data.nbytes} bytes")
        array = np.ndarray(shape, dtype, buffer=data if data.nbytes else bytearray(1), offset=at, strides=strides)
    if entry.get("readonly"):
        array.flags.writeable = False
    return array


_TORCH_FORMATS: dict[torch.dtype, bool] = {}


def can_be_written(dtype: torch.dtype) -> bool:
    """Return whether tensors of a format can be copied and viewed as bytes; torch cannot for its formats below a byte."""
    if dtype not in _TORCH_FORMATS:
        try:
            torch.empty(1, dtype=dtype).copy_(torch.empty(1, dtype=dtype)).contiguous().view(torch.uint8).numpy()
            _TORCH_FORMATS[dtype] = True
        except (RuntimeError, TypeError):
            _TORCH_FORMATS[dtype] = False
    return _TORCH_FORMATS[dtype]


class KnownType(NamedTuple):
    """How values of one type are written and read."""

    type: type
    parts: Callable[[Any], list[Any]]
    """Return the parts; ``ValueError`` if this value cannot be made again."""
    make: Callable[..., Any]


def make_scalar(dtype: str, text: str) -> Any:
    """Return a NumPy scalar."""
    kind = numpy_dtype(dtype)
    return np.frombuffer(bytes.fromhex(text), kind, 1)[0] if kind.itemsize else kind.type()


def _named(of: type) -> Callable[[str], Any]:
    def make(name: str) -> Any:
        value = getattr(torch, name, None)
        if type(value) is not of:
            raise ValueError(f"torch has no {of.__name__} {name[:40]!r}")
        return value

    return make


def _name_in_torch(value: Any) -> list[Any]:
    return [str(value).removeprefix("torch.")]


def _timezone_parts(zone: datetime.timezone) -> list[Any]:
    offset, name = zone.utcoffset(None), zone.tzname(None)
    return [offset] if name == datetime.timezone(offset).tzname(None) else [offset, name]


def _bits_parts(bits: Any) -> list[Any]:
    seeds = bits.seed_seq
    if type(seeds) is not np.random.SeedSequence:
        raise ValueError("seeded by another object than a SeedSequence")
    return [seeds.entropy, list(seeds.spawn_key), seeds.pool_size, seeds.n_children_spawned, bits.state]


def _bits_of(of: Any) -> Callable[..., Any]:
    def make(entropy: Any, spawn_key: list[int], pool: int, children: int, state: dict[str, Any]) -> Any:
        if type(pool) is not int or not 4 <= pool <= 1024:
            raise ValueError("no size of a seed's pool")
        bits = of(np.random.SeedSequence(entropy, spawn_key=spawn_key, pool_size=pool, n_children_spawned=children))
        bits.state = _within(state)
        return bits

    return make


def _within(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a bit generator whose positions lie inside its words: NumPy reads the memory behind them."""
    inner = state["state"]
    if "pos" in inner and not 0 <= int(inner["pos"]) <= len(inner["key"]) == 624:
        raise ValueError(f"the generator is at word {inner['pos']} of {len(inner['key'])}")
    if "buffer_pos" in state and not 0 <= int(state["buffer_pos"]) <= len(state["buffer"]) == 4:
        raise ValueError(f"the generator is at word {state['buffer_pos']} of its buffer")
    return state


def _random_state_parts(value: Any) -> list[Any]:
    state = value.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        raise ValueError(f"a RandomState over {state['bit_generator']}")
    return [state]


def _python_generator(state: Any) -> random.Random:
    made = random.Random(0)
    made.setstate(state)
    return made


def _numpy_state(state: Any) -> np.random.RandomState:
    made = np.random.RandomState(0)
    made.set_state(_within(state))
    return made


def _torch_generator(device: str, state: Any) -> torch.Generator:
    made = torch.Generator(device)
    made.set_state(state)
    return made


def _typed_array(code: str, data: bytes) -> Any:
    made = array.array(code)
    made.frombytes(data)
    return made


def _paths() -> dict[str, KnownType]:
    paths = (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.WindowsPath, pathlib.PureWindowsPath)
    return {of.__name__: KnownType(of, lambda path: [str(path)], of) for of in paths}


_BITS = (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
VALUES: dict[str, KnownType] = {
    "int": KnownType(int, lambda v: [hex(v)], lambda text: int(text, 16)),
    "float": KnownType(
        float, lambda v: [struct.pack("<d", v).hex()], lambda t: struct.unpack("<d", bytes.fromhex(t))[0]
    ),
    "complex": KnownType(
        complex,
        lambda v: [struct.pack("<dd", v.real, v.imag).hex()],
        lambda text: complex(*struct.unpack("<dd", bytes.fromhex(text))),
    ),
    "str": KnownType(
        str,
        lambda v: [v.encode("utf-32-le", "surrogatepass").hex()],
        lambda text: bytes.fromhex(text).decode("utf-32-le", "surrogatepass"),
    ),
    "bytes": KnownType(
        bytes, lambda v: [base64.b64encode(v).decode()], lambda text: base64.b64decode(text, validate=True)
    ),
    "ellipsis": KnownType(types.EllipsisType, lambda v: [], lambda: ...),
    "range": KnownType(range, lambda v: [v.start, v.stop, v.step], range),
    "slice": KnownType(slice, lambda v: [v.start, v.stop, v.step], slice),
    "Decimal": KnownType(decimal.Decimal, lambda v: [str(v)], decimal.Decimal),
    "Fraction": KnownType(fractions.Fraction, lambda v: [v.numerator, v.denominator], fractions.Fraction),
    "date": KnownType(datetime.date, lambda v: [v.year, v.month, v.day], datetime.date),
    "time": KnownType(
        datetime.time,
        lambda v: [v.hour, v.minute, v.second, v.microsecond, v.tzinfo, v.fold],
        lambda *parts: datetime.time(*parts[:5], fold=parts[5]),
    ),
    "datetime": KnownType(
        datetime.datetime,
        lambda v: [v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond, v.tzinfo, v.fold],
        lambda *parts: datetime.datetime(*parts[:8], fold=parts[8]),
    ),
    "timedelta": KnownType(datetime.timedelta, lambda v: [v.days, v.seconds, v.microseconds], datetime.timedelta),
    "timezone": KnownType(datetime.timezone, _timezone_parts, datetime.timezone),
    "UUID": KnownType(uuid.UUID, lambda v: [v.hex], uuid.UUID),
    "torch.Size": KnownType(torch.Size, lambda v: [list(v)], torch.Size),
    "torch.dtype": KnownType(torch.dtype, _name_in_torch, torch_dtype),
    "torch.layout": KnownType(torch.layout, _name_in_torch, _named(torch.layout)),
    "torch.memory_format": KnownType(torch.memory_format, _name_in_torch, _named(torch.memory_format)),
    "torch.device": KnownType(torch.device, lambda v: [str(v)], torch.device),
    **_paths(),
}
"""Values that cannot change, so that it does not matter whether two names mean one."""

OBJECTS: dict[str, KnownType] = {
    "bytearray": KnownType(bytearray, lambda v: [bytes(v)], bytearray),
    "array.array": KnownType(array.array, lambda v: [v.typecode, v.tobytes()], _typed_array),
    "random.Random": KnownType(random.Random, lambda v: [v.getstate()], _python_generator),
    "numpy.Generator": KnownType(np.random.Generator, lambda v: [v.bit_generator], np.random.Generator),
    "numpy.RandomState": KnownType(np.random.RandomState, _random_state_parts, _numpy_state),
    "torch.Generator": KnownType(torch.Generator, lambda v: [str(v.device), v.get_state()], _torch_generator),
    **{f"numpy.{of.__name__}": KnownType(of, _bits_parts, _bits_of(of)) for of in _BITS},
}
"""Values that can change, whose parts cannot contain themselves."""

FACTORIES = {of.__name__: of for of in (int, float, complex, bool, str, bytes, list, dict, set, tuple, deque, Counter)}
"""What a ``defaultdict`` may call."""
DICTS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter, "defaultdict": defaultdict}

VALUE_KINDS = {row.type: (kind, row) for kind, row in VALUES.items()}
OBJECT_KINDS = {row.type: (kind, row) for kind, row in OBJECTS.items()}


def scalar_parts(value: np.generic) -> list[Any]:
    """Return the parts of a NumPy scalar.

    Raises:
        ValueError: it is a record, which is a view of its array, or an object.
    """
    if isinstance(value, np.void) or type(value) is not value.dtype.type:
        raise ValueError(type(value).__name__)
    return [dtype_text(value.dtype), value.tobytes().hex()]
