"""Tensors and arrays as bytes: which of them share memory, and how each lies in it.

Values whose memory overlaps are written once, as one span of memory, and are views of one memory again when they are read. A value alone
is written densely, without the gaps of a slice; its order of dimensions is kept, since sums over a gradient depend on it.
"""

from __future__ import annotations

import ast
import ctypes
import math
from collections.abc import Mapping
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
    """Return the array as a tensor over the same memory; torch would warn of one that is read-only."""
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
