"""The types of values that are made anew from their parts: numbers, texts, dates, paths, generators, formats. Each has one row.

Reading a row calls one known constructor with parts that are such values again; no file can name another.
"""

from __future__ import annotations

import array
import base64
import datetime
import decimal
import fractions
import pathlib
import random
import struct
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from mezzo.engine.snapshots.memory import dtype_text, numpy_dtype, torch_dtype


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
