"""Convert a state to JSON and named tensors, and back.

Only the types that this file knows are restored. A file cannot name any other, so reading one runs no code, whoever wrote it.
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mezzo.engine.processes.shards import is_shared
from mezzo.engine.snapshots.sharded import Shard, shard_of
from mezzo.errors import SnapshotError

_DICTS: dict[str, Callable[[Any], Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_PLAIN = (bool, int, float, str, type(None))
MARK = "$"
"""The JSON key for the type of a value that JSON has no notation for."""
ALLOWED = "numbers, texts, bytes, None, tensors, NumPy arrays, and dicts, lists, tuples and sets of these"


def take_apart(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return ``state`` as a JSON value, and its tensors by their paths in it; a tensor that occurs twice has one name.

    The tensors are those of ``state`` themselves: copy them before training continues.

    Raises:
        SnapshotError: it contains a value of a type that cannot be saved.
    """
    parts = _Parts()
    return parts.written(state, ""), parts.tensors


def put_together(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state from the results of ``take_apart``.

    Raises:
        ValueError: ``tree`` is not a result of ``take_apart``, or names a missing tensor.
    """
    if isinstance(tree, list):
        return [put_together(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if MARK not in tree:
        return {key: put_together(value, tensors) for key, value in tree.items()}
    kind, value = tree[MARK], tree.get("value")
    if kind in ("tensor", "array", "scalar"):
        return _read_tensor(kind, tree, tensors)
    if kind == "shard":
        shape, at = (tuple(map(int, tree[key])) for key in ("shape", "at"))
        return Shard(_read_tensor("tensor", tree, tensors), shape, at)
    if kind in _DICTS and isinstance(value, list):
        pairs = [put_together(pair, tensors) for pair in value]
        return _DICTS[kind](dict(pairs))
    if kind in ("tuple", "set") and isinstance(value, list):
        return (tuple if kind == "tuple" else set)(put_together(value, tensors))
    if kind == "bytes" and isinstance(value, str):
        return base64.b64decode(value, validate=True)
    if kind == "complex" and isinstance(value, list):
        return complex(*value)
    raise ValueError(f"unknown kind of value {str(kind)[:40]!r}")


def _read_tensor(kind: str, tree: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    name = tree.get("value")
    if not isinstance(name, str) or name not in tensors:
        raise ValueError(f"no tensor {str(name)[:80]!r}")
    tensor = tensors[name]
    if kind == "tensor":
        return _arranged(tensor, tree["order"]) if "order" in tree else tensor
    array = tensor.numpy()
    return array if kind == "array" else array.reshape(())[()]


def _arranged(tensor: Tensor, order: Any) -> Tensor:
    """Return the same values with their dimensions laid out in memory in ``order``, the outermost first."""
    if not isinstance(order, list) or sorted(order) != list(range(tensor.dim())):
        raise ValueError(f"no order of {tensor.dim()} dimensions: {str(order)[:40]}")
    back = [order.index(dim) for dim in range(tensor.dim())]
    return tensor.permute(order).contiguous().permute(back)


def _order(tensor: Tensor) -> list[int] | None:
    """Return the order of a tensor's dimensions in memory; None if it is the usual one, or if the tensor has gaps."""
    order = sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride()[dim], dim))
    usual = tensor.is_contiguous() or not tensor.permute(order).is_contiguous()
    return None if usual else order


class _Parts:
    """The tensors found so far, and the JSON value around them."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def written(self, value: Any, place: str) -> Any:
        """Return ``value`` as a JSON value; ``place`` is its path in the state."""
        if type(value) in _PLAIN:
            return value
        if isinstance(value, Tensor):
            if not is_shared(value):
                return self._tensor("tensor", value.detach(), place)
            value = shard_of(value)
        if isinstance(value, Shard):
            return {**self._tensor("shard", value.part, place), "shape": [*value.shape], "at": [*value.at]}
        if isinstance(value, np.ndarray) and value.dtype != object:
            return self._tensor("array", torch.from_numpy(np.ascontiguousarray(value)), place)
        if isinstance(value, np.float64):  # a Python float, to the bit
            return float(value)
        if isinstance(value, (np.number, np.bool_)):
            return self._tensor("scalar", torch.from_numpy(np.atleast_1d(value)), place)
        if isinstance(value, (list, tuple, set, frozenset)):
            return self._several(value, place)
        if type(value).__name__ in _DICTS and isinstance(value, dict):
            return self._dict(value, place)
        if isinstance(value, bytes):
            return {MARK: "bytes", "value": base64.b64encode(value).decode()}
        if isinstance(value, complex):
            return {MARK: "complex", "value": [value.real, value.imag]}
        raise SnapshotError(
            f"the state contains a {type(value).__qualname__} at {place or 'its top'}; allowed: {ALLOWED}",
            hint="leave it out of the state_dict(), or convert it to these types: a snapshot can be read without running code",
        )

    def _several(self, value: Any, place: str) -> Any:
        items = [self.written(item, f"{place}.{number}" if place else str(number)) for number, item in enumerate(value)]
        if type(value) is list:
            return items
        return {MARK: "tuple" if isinstance(value, tuple) else "set", "value": items}

    def _dict(self, value: dict[Any, Any], place: str) -> Any:
        inner = {key: f"{place}.{key}" if place else str(key) for key in value}
        if type(value) is dict and all(type(key) is str for key in value) and MARK not in value:
            return {key: self.written(item, inner[key]) for key, item in value.items()}
        pairs = [[self.written(key, inner[key]), self.written(item, inner[key])] for key, item in value.items()]
        return {MARK: type(value).__name__, "value": pairs}

    def _tensor(self, kind: str, tensor: Tensor, place: str) -> Any:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise SnapshotError(
                f"the state contains a tensor of layout {tensor.layout} at {place}; allowed: dense tensors",
                hint="convert it to a dense tensor before it is saved",
            )
        where = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        name = self._names.get(where) if tensor.numel() else None
        if name is None:
            name = place
            while name in self.tensors or name == "__metadata__":
                name += "'"
            self.tensors[name] = tensor
            self._names[where] = name
        order = _order(tensor)  # sums over a gradient depend on it
        return {MARK: kind, "value": name} | ({} if order is None else {"order": order})
