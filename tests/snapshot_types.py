"""Values of every type of Python, NumPy and torch that a training may hold, and a description of each by which two can be compared."""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import io
import itertools
import math
import pathlib
import random
import re
import struct
import threading
import types
import uuid
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


class Level(enum.IntEnum):
    LOW = 1


class Colour(enum.Enum):
    RED = "red"


class Whole(int): ...


class Real(float): ...


class Text(str): ...


class Names(list[str]): ...


class Table(dict[str, int]): ...


class Numbers(np.ndarray[Any, Any]): ...


class Weights(torch.Tensor): ...


Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass(unsafe_hash=True)
class Settings:
    a: int = 1


def seeded(of: Any) -> np.random.Generator:
    generator = np.random.Generator(of(np.random.SeedSequence([1, 2], spawn_key=(3,))))
    generator.spawn(1)
    generator.standard_normal(7)
    return generator


def drawn(seed: int) -> random.Random:
    generator = random.Random(seed)
    generator.gauss(0, 1)
    return generator


def torch_generator() -> torch.Generator:
    generator = torch.Generator().manual_seed(5)
    torch.randn(3, generator=generator)
    return generator


def numpy_state() -> np.random.RandomState:
    state = np.random.RandomState(3)
    state.standard_normal()
    return state


def frozen(values: Any) -> Any:
    values.flags.writeable = False
    return values


def state_dict_with_attribute() -> OrderedDict[str, Any]:
    state = OrderedDict(a=1)
    state._metadata = OrderedDict(version=2)  # type: ignore[attr-defined]
    return state


RECORDS = np.array([(1, 2.5, "a"), (3, 4.5, "bc")], dtype=[("n", "<i2"), ("x", ">f8"), ("s", "<U3")])
ALIGNED = np.zeros(2, dtype=np.dtype([("a", "u1"), ("b", "<f8", (2,))], align=True))
FLOATS8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SAVED: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "int": lambda: -7,
    "int of 64 bits": lambda: 2**63 - 1,
    "huge int": lambda: 7**6000,
    "huge negative int": lambda: -(2**63) - 1,
    "float": lambda: 0.1,
    "minus zero": lambda: -0.0,
    "subnormal": lambda: 5e-324,
    "inf": lambda: -math.inf,
    "nan": lambda: math.nan,
    "nan with bits": lambda: struct.unpack("<d", bytes.fromhex("010000000000f8ff"))[0],
    "complex": lambda: complex(-0.0, math.inf),
    "str": lambda: "naïve \0 文",
    "str with half characters": lambda: "\ud83d\ude00",
    "empty str": lambda: "",
    "bytes": lambda: b"\x00\xff",
    "bytearray": lambda: bytearray(b"ab"),
    "Ellipsis": lambda: ...,
    "range": lambda: range(3, 2**70, 2),
    "slice": lambda: slice(1, None, -1),
    "Decimal": lambda: decimal.Decimal("1.230E+5"),
    "Decimal nan": lambda: decimal.Decimal("sNaN12"),
    "Fraction": lambda: fractions.Fraction(-3, 7),
    "date": lambda: dt.date(2024, 2, 29),
    "time": lambda: dt.time(1, 2, 3, 4, fold=1),
    "datetime": lambda: dt.datetime(2024, 2, 29, 5, tzinfo=dt.timezone(dt.timedelta(hours=1), "X"), fold=1),
    "timedelta": lambda: dt.timedelta(-1, 2, 3),
    "utc": lambda: dt.timezone.utc,
    "UUID": lambda: uuid.UUID(int=5),
    "Path": lambda: pathlib.Path("a/../b"),
    "PurePosixPath": lambda: pathlib.PurePosixPath("/x"),
    "PureWindowsPath": lambda: pathlib.PureWindowsPath("C:\\x"),
    "list": lambda: [1, [2.5, None], "x"],
    "list of nan": lambda: [math.nan, 1],
    "tuple": lambda: (1, (), ("a",)),
    "set": lambda: {1, "a", (2, 3)},
    "frozenset": lambda: frozenset({1, 2}),
    "dict": lambda: {"a": {"b": 1}},
    "dict with keys of all kinds": lambda: {1: "a", "1": "b", (1, 2): "c", None: "d", 1.5: "e", b"x": "f"},
    "dict with the mark": lambda: {"$": "tensor", "value": "x"},
    "deque": lambda: deque([1, 2, 3], maxlen=2),
    "deque without end": lambda: deque([1]),
    "defaultdict": lambda: defaultdict(list, {"a": [1]}),
    "defaultdict of nothing": lambda: defaultdict(None, {2: 3}),
    "OrderedDict": lambda: OrderedDict(b=1, a=2),
    "state dict with _metadata": state_dict_with_attribute,
    "Counter": lambda: Counter("aab"),
    "SimpleNamespace": lambda: types.SimpleNamespace(a=1, b=[2]),
    "array.array": lambda: array.array("d", [1.0, 2.0]),
    "random.Random": lambda: drawn(3),
    "np PCG64": lambda: seeded(np.random.PCG64),
    "np PCG64DXSM": lambda: seeded(np.random.PCG64DXSM),
    "np MT19937": lambda: seeded(np.random.MT19937),
    "np Philox": lambda: seeded(np.random.Philox),
    "np SFC64": lambda: seeded(np.random.SFC64),
    "np RandomState": numpy_state,
    "torch.Generator": torch_generator,
    **{f"np.{t}": lambda t=t: np.dtype(t).type(3) for t in "bool int8 uint8 int16 uint16 int32 uint32 int64".split()},  # noqa: SIM905
    **{f"np.{t}": lambda t=t: np.dtype(t).type(3.5) for t in "uint64 float16 float32 float64 longdouble complex64 complex128".split()},  # noqa: SIM905
    "np.str_": lambda: np.str_("abc"),
    "empty np.str_": lambda: np.str_(""),
    "np.bytes_": lambda: np.bytes_(b"a"),
    "np.datetime64": lambda: np.datetime64("2024-02-29T01:02", "ns"),
    "np NaT": lambda: np.datetime64("NaT"),
    "np.timedelta64": lambda: np.timedelta64(5, "D"),
    "np.dtype": lambda: np.dtype(">f4"),
    "np.dtype of records": lambda: ALIGNED.dtype,
    "array": lambda: np.arange(6, dtype=np.int32).reshape(2, 3),
    "array of no dimensions": lambda: np.array(2.5),
    "array of bool": lambda: np.array([True, False]),
    "array of float16": lambda: np.array([1.5], np.float16),
    "array of uint64": lambda: np.array([2**64 - 1], np.uint64),
    "array of complex": lambda: np.array([1j]),
    "array of long double": lambda: np.array([1, 2], np.longdouble),
    "empty array": lambda: np.zeros((0, 3)),
    "empty array of texts": lambda: np.zeros((2, 0), "<U4"),
    "Fortran order": lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "reversed": lambda: np.arange(4)[::-1],
    "slice of an array": lambda: np.arange(9)[::2],
    "broadcast": lambda: np.broadcast_to(np.arange(3), (2, 3)),
    "big-endian": lambda: np.array([1, 2], ">i4"),
    "array of texts": lambda: np.array(["a", "bcd"]),
    "array of one text": lambda: np.array("ab"),
    "array of bytes": lambda: np.array([b"a", b"bcd"]),
    "array of dates": lambda: np.array(["2024-01-01", "NaT"], "M8[D]"),
    "array of durations": lambda: np.array([1, 2], "m8[s]"),
    "records": lambda: RECORDS.copy(),
    "aligned records": lambda: ALIGNED.copy(),
    "read-only": lambda: frozen(np.arange(3)),
    "masked": lambda: np.ma.MaskedArray([1, 2, 3], [0, 1, 0], fill_value=-5),
    "masked without mask": lambda: np.ma.MaskedArray([1.0, 2.0]),
    "hard mask": lambda: np.ma.MaskedArray(["a", "b"], [True, False], hard_mask=True),
    **{f"{d}": lambda d=d: torch.tensor([0, 1]).to(d) for d in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
        torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, *FLOATS8,
    )},
    "tensor of no dimensions": lambda: torch.tensor(2.5),
    "empty tensor": lambda: torch.zeros(0, 4),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "channels last": lambda: torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.arange(3.0)[:, None].expand(3, 2),
    "slice of a tensor": lambda: torch.arange(9)[::2],
    "conjugate": lambda: torch.tensor([1j]).conj(),
    "negative view": lambda: torch.tensor([1j]).conj().imag,
    "with gradient": lambda: _with_gradient(torch.ones(2, requires_grad=True)),
    "Parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "frozen Parameter": lambda: torch.nn.Parameter(torch.ones(2), requires_grad=False),
    "torch.Size": lambda: torch.Size([2, 3]),
    "torch.dtype": lambda: torch.bfloat16,
    "torch.device": lambda: torch.device("cuda:1"),
    "torch.layout": lambda: torch.sparse_csr,
    "torch.memory_format": lambda: torch.channels_last,
}  # fmt: skip
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "IntEnum": (lambda: Level.LOW, "a Level"),
    "Enum": (lambda: Colour.RED, "a Colour"),
    "subclass of int": (lambda: Whole(3), "a Whole"),
    "subclass of float": (lambda: Real(3), "a Real"),
    "subclass of str": (lambda: Text("a"), "a Text"),
    "subclass of list": (lambda: Names(["a"]), "a Names"),
    "subclass of dict": (lambda: Table(a=1), "a Table"),
    "named tuple": (lambda: Pair(1, 2), "a Pair"),
    "dataclass": (Settings, "a Settings"),
    "function": (lambda: _with_gradient, "a function"),
    "lambda": (lambda: lambda: 1, "a function"),
    "class": (lambda: Settings, "a type"),
    "module": (lambda: math, "a module"),
    "generator": (lambda: (n for n in [1]), "a generator"),
    "list iterator": (lambda: iter([1]), "a list_iterator"),
    "count": (itertools.count, "a count"),
    "pattern": (lambda: re.compile("a"), "a Pattern"),
    "file": (io.BytesIO, "a BytesIO"),
    "lock": (threading.Lock, "a lock"),
    "weak reference": (lambda: weakref.ref(Settings), "a ReferenceType"),
    "memoryview": (lambda: memoryview(b"a"), "a memoryview"),
    "mapping proxy": (lambda: types.MappingProxyType({}), "a mappingproxy"),
    "SystemRandom": (random.SystemRandom, "a SystemRandom"),
    "RandomState over PCG64": (lambda: np.random.RandomState(np.random.PCG64(1)), "a RandomState over PCG64"),
    "defaultdict of a lambda": (lambda: defaultdict(lambda: 1), "a defaultdict that calls a function"),
    "array of objects": (lambda: np.array([Settings()]), "a ndarray of object"),
    "array of long texts": (lambda: np.array(["a"], np.dtypes.StringDType()), "a ndarray of StringDType"),
    "subclass of ndarray": (lambda: np.zeros(2).view(Numbers), "a Numbers"),
    "record array": (lambda: RECORDS.view(np.recarray), "a recarray"),
    "record": (lambda: RECORDS[0], "a void"),
    "masked constant": (lambda: np.ma.masked, "a MaskedConstant"),
    "sparse": (lambda: torch.eye(2).to_sparse(), "not dense: of layout torch.sparse_coo"),
    "sparse CSR": (lambda: torch.eye(2).to_sparse_csr(), "not dense: of layout torch.sparse_csr"),
    "meta": (lambda: torch.zeros(2, device="meta"), "without values"),
    "nested": (lambda: torch.nested.as_nested_tensor([torch.ones(2)], layout=torch.jagged), "a tensor of the class NestedTensor"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8), "not dense: quantized"),
    "part of a graph": (lambda: torch.ones(2, requires_grad=True) * 2, "part of a graph: save tensor.detach"),
    "subclass of Tensor": (lambda: torch.zeros(2).as_subclass(Weights), "a tensor of the class Weights"),
    "4 bits": (lambda: torch.empty(2, dtype=torch.uint4), "a tensor of torch.uint4"),
    "module of torch": (lambda: torch.nn.Linear(1, 1), "a Linear"),
    "optimizer": (lambda: torch.optim.SGD([torch.ones(1)]), "a SGD"),
}  # fmt: skip


def _with_gradient(tensor: torch.Tensor) -> torch.Tensor:
    tensor.grad = torch.full_like(tensor, 3)
    return tensor


def described(value: Any) -> Any:
    """Return all that must come back, as texts and tuples that Python compares: written without the code under test."""
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().resolve_neg()
        dense = plain.is_contiguous() or plain.numel() == 0 or not plain.permute(_order(plain)).is_contiguous()
        strides = value.stride() if not dense or 0 in value.stride() else None
        data = (
            bytes(plain.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8).tolist())
            if plain.numel()
            else b""
        )
        return kind, value.dtype, value.shape, strides, data, value.requires_grad, described(value.grad)
    if isinstance(value, np.ma.MaskedArray):
        fill = described(value.fill_value)
        return kind, described(value.data), described(value.mask), value.mask is np.ma.nomask, fill, value.hardmask
    if isinstance(value, np.ndarray):
        order = value.flags.f_contiguous and not value.flags.c_contiguous
        plain = value
        if value.dtype.names:  # what lies between the fields is nobody's, and is not copied either
            plain = np.zeros(value.shape, value.dtype)
            for name in value.dtype.names:
                plain[name] = value[name]
        return kind, value.dtype, value.dtype.byteorder, value.shape, order, value.flags.writeable, plain.tobytes()
    if isinstance(value, np.generic):
        return kind, str(value.dtype), value.tobytes()
    if isinstance(value, (float, complex)):
        return kind, struct.pack("<dd", value.real, value.imag)
    if isinstance(value, dict):
        extra = described(vars(value)) if getattr(value, "__dict__", None) else getattr(value, "default_factory", None)
        return kind, [(described(k), described(v)) for k, v in value.items()], extra
    if isinstance(value, (set, frozenset)):
        return kind, sorted(map(repr, map(described, value)))
    if isinstance(value, (list, tuple, deque)):
        return kind, [described(item) for item in value], getattr(value, "maxlen", None)
    if isinstance(value, types.SimpleNamespace):
        return kind, described(vars(value))
    if isinstance(value, np.random.Generator):
        seeds: Any = value.bit_generator.seed_seq
        return kind, repr(value.bit_generator.state), str(seeds), seeds.n_children_spawned
    if isinstance(value, np.random.RandomState):
        return kind, repr(value.get_state())
    if isinstance(value, random.Random):
        return kind, value.getstate()
    if isinstance(value, torch.Generator):
        return kind, described(value.get_state())
    if isinstance(value, np.dtype):
        return value.str, value.itemsize, repr(value.fields)
    return kind, hex(value) if isinstance(value, int) else repr(value)


def _order(tensor: torch.Tensor) -> list[int]:
    return sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim])


PLACES: dict[str, Callable[[Any], Any]] = {
    "top": lambda value: value,
    "list": lambda value: [value],
    "dict": lambda value: {"a": value},
    "tuple": lambda value: (value, 1),
    "attribute": lambda value: types.SimpleNamespace(a=value),
    "set": lambda value: {value},
    "key": lambda value: {value: 1},
}
