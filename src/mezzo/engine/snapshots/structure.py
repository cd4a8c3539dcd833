"""Convert a state to JSON and named tensors, and back.

Only the types that these files know are restored, each exactly: a value that would come back changed is refused by name. A file cannot name
any other type, so reading one runs no code, whoever wrote it.

What several names mean is written once: a list, dict, set, array or tensor that occurs again is ``{"$": "same", "value": number}``. Both
sides count alike: what can change when it begins, so that it may contain itself, and tuples when they are complete.

The same number of processes loads the shards as they are. Any other number assembles the whole tensors from all files and shards them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mezzo.engine.gradients import trained_by
from mezzo.engine.optimizers.one_pass import OnePass
from mezzo.engine.processes.shards import is_shared, local, shared_as
from mezzo.engine.snapshots.kinds import (
    DICTS,
    FACTORIES,
    OBJECT_KINDS,
    OBJECTS,
    VALUE_KINDS,
    VALUES,
    Entry,
    MemorySpans,
    can_be_written,
    dtype_text,
    make_scalar,
    numpy_dtype,
    read_array,
    read_tensor,
    scalar_parts,
)
from mezzo.errors import SnapshotError

MARK = "$"
"""The JSON key for the type of a value that JSON has no notation for."""
ALLOWED = "numbers, texts, bytes, None, dates, generators, dense tensors, NumPy arrays, and dicts, lists, tuples and sets of these"
_DEEPEST = 150
_LONGEST_NAME = 200
_SMALL = 2**63
_FROM_DICT = {of: kind for kind, of in DICTS.items()}
_WITHOUT_VALUE = (bool, type(None))


class Memo:
    """What has been written so far, and the tensors found; one memo serves several calls of ``encode``."""

    def __init__(self) -> None:
        self._numbers: dict[int, Any] = {}
        """By identity: the entry of what was written before, or None for a tuple that is not complete."""
        self._alive: list[Any] = []
        """What was written, so that no identity is used again."""
        self._count = 0
        self._path: list[str] = []
        self._regions = MemorySpans()

    def know(self, value: Any, name: str) -> None:
        """Write ``value`` as a name from now on, of whatever type it is; ``Made`` gets the object of that name."""
        self._alive.append(value)
        self._numbers[id(value)] = {MARK: "known", "value": name}

    def finish(self) -> dict[str, Tensor]:
        """Return all tensors by name; the trees of ``encode`` are complete only now."""
        return self._regions.finish()

    def written(self, value: Any) -> Any:
        """Return ``value`` as a JSON value."""
        kind = type(value)
        if kind in _WITHOUT_VALUE:
            return value
        if kind in VALUE_KINDS:
            return value if _is_json(value, kind) else self._row(*VALUE_KINDS[kind], value)
        before = self._numbers.get(id(value), self)
        if before is not self:
            if before is None:
                raise self._refusal("a tuple that contains itself")
            return before
        if len(self._path) > _DEEPEST:
            raise self._refusal(f"values nested more than {_DEEPEST} deep")
        if kind is list:
            self._number(value)
            return [*value] if _are_json(value) else self._items(value)
        if kind in _FROM_DICT:
            self._number(value)
            return self._dict(value, _FROM_DICT[kind])
        if kind in (tuple, frozenset):
            self._numbers[id(value)] = None
            entry = {MARK: kind.__name__, "value": self._items(value)}
            self._number(value)
            return entry
        if kind in OBJECT_KINDS:
            return self._object(*OBJECT_KINDS[kind], value)
        return self._other(value)

    def _number(self, value: Any) -> None:
        self._numbers[id(value)] = {MARK: "same", "value": self._count}
        self._alive.append(value)
        self._count += 1

    def _other(self, value: Any) -> Any:
        kind = type(value)
        if kind is set:
            self._number(value)
            return {MARK: "set", "value": self._items(value)}
        if kind is deque:
            self._number(value)
            return {MARK: "deque", "value": self._items(value), "most": value.maxlen}
        if kind is SimpleNamespace:
            self._number(value)
            return {MARK: "namespace", "value": self._pairs(vars(value))}
        if isinstance(value, Tensor):
            return self._tensor(value)
        if kind is Shard:
            part = self._region("tensor", value.part)
            self._count += 1  # as the reader counts every tensor
            return {MARK: "shard", "part": part, "shape": [*value.shape], "at": [*value.at]}
        if kind is np.ndarray:
            self._number(value)
            entry = self._region("array", value)
            if not value.flags.writeable:
                entry["readonly"] = True
            return entry
        if kind is np.ma.MaskedArray and type(value.data) is np.ndarray:
            return self._masked(value)
        try:
            if isinstance(value, np.generic):
                return {MARK: "scalar", "value": scalar_parts(value)}
            if isinstance(value, np.dtype):
                return {MARK: "dtype", "value": dtype_text(value)}
        except ValueError:
            pass
        raise self._refusal(f"a {kind.__qualname__}")

    def _row(self, kind: str, row: Any, value: Any) -> Any:
        try:
            parts = row.parts(value)
        except ValueError as error:
            raise self._refusal(f"a {row.type.__qualname__} ({error})") from None
        return {MARK: kind, "value": [self.written(part) for part in parts]}

    def _object(self, kind: str, row: Any, value: Any) -> Any:
        entry = self._row(kind, row, value)
        self._number(value)
        return entry

    def _items(self, value: Any) -> list[Any]:
        items = []
        for number, item in enumerate(value):
            self._path.append(str(number))
            items.append(self.written(item))
            self._path.pop()
        return items

    def _pairs(self, value: Any) -> list[Any]:
        pairs = []
        for number, (key, item) in enumerate(value.items()):
            self._path.append(_name_of(key, number))
            pairs.append([self.written(key), self.written(item)])
            self._path.pop()
        return pairs

    def _dict(self, value: dict[Any, Any], kind: str) -> Any:
        if kind == "dict" and MARK not in value and all(type(key) is str and _is_json(key, str) for key in value):
            entry: Entry = {}
            for key, item in value.items():
                self._path.append(key)
                entry[key] = self.written(item)
                self._path.pop()
            return entry
        entry = {MARK: kind, "value": self._pairs(value)}
        if kind == "defaultdict":
            factory = value.default_factory  # type: ignore[attr-defined]
            if factory is not None and FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
                raise self._refusal("a defaultdict that calls a function of the script")
            entry["calls"] = None if factory is None else factory.__name__
        attributes = getattr(value, "__dict__", None)
        if attributes:  # as ``_metadata`` of a module's state dict
            entry["attributes"] = self._pairs(attributes)
        return entry

    def _tensor(self, value: Any) -> Any:
        if is_shared(value):
            return self.written(shard_of(value))
        what = _unwritable(value)
        if what:
            raise self._refusal(f"a tensor {what}")
        self._number(value)
        plain = value.detach().resolve_conj().resolve_neg()
        entry = self._region("tensor", plain)
        if value.requires_grad:
            entry["requires_grad"] = True
        if type(value) is nn.Parameter:
            entry["parameter"] = True
        if value.is_leaf and value.grad is not None:
            self._path.append("grad")
            entry["grad"] = self.written(value.grad)
            self._path.pop()
        return entry

    def _masked(self, value: Any) -> Any:
        self._number(value)
        mask = None if value.mask is np.ma.nomask else value.mask
        fill = value.fill_value
        is_default = bool(np.all(fill == np.ma.default_fill_value(value.data)))
        parts = [value.data, mask, None if is_default else fill, bool(value.hardmask)]
        self._alive += parts
        return {MARK: "masked", "value": [self.written(part) for part in parts]}

    def _region(self, kind: str, value: Any) -> Any:
        self._alive.append(value)
        if isinstance(value, Tensor) and not can_be_written(value.dtype):
            raise self._refusal(f"a tensor of {value.dtype}")
        if isinstance(value, np.ndarray):
            try:
                dtype_text(value.dtype)
            except ValueError as error:
                raise self._refusal(f"a ndarray of {error}") from None
        return self._regions.add(value, {MARK: kind}, ".".join(self._path))

    def _refusal(self, what: str) -> SnapshotError:
        place = ".".join(self._path)
        return SnapshotError(
            f"the state contains {what} at {place or 'its top'}; allowed: {ALLOWED}",
            hint="leave it out of the state_dict(), or convert it to these types: a snapshot can be read without running code",
        )


def encode(value: Any, *, memo: Memo, place: str = "") -> Any:
    """Return ``value`` as a JSON value, to be read by ``Made.decode`` after the values that ``memo`` has written before it.

    The tensors of ``memo.finish()`` are the same objects as in ``value``: copy them before training continues.

    Args:
        value: the state.
        memo: what was written before, and which objects are known by a name.
        place: the state's name, with which the names of its tensors begin.

    Raises:
        SnapshotError: it contains a value that cannot be saved exactly.
    """
    depth = len(memo._path)
    memo._path += [place] if place else []
    try:
        return memo.written(value)
    except RecursionError:
        raise memo._refusal("values nested too deep") from None
    finally:
        del memo._path[depth:]


def take_apart(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return ``state`` as a JSON value, and its tensors by name, as ``encode`` does.

    Raises:
        SnapshotError: it contains a value that cannot be saved exactly.
    """
    memo = Memo()
    tree = encode(state, memo=memo)
    return tree, memo.finish()


def put_together(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state from the results of ``take_apart``.

    Raises:
        ValueError: ``tree`` is not a result of ``take_apart``, or names a missing tensor.
    """
    return Made(tensors).decode(tree)


def _is_json(value: Any, kind: type) -> bool:
    """Return whether JSON has a notation for a value, from which it comes back the same."""
    if kind is int:
        return bool(-_SMALL <= value < _SMALL)
    if kind is float:
        return not math.isnan(value)  # the bits of a NaN are kept
    if kind is not str:
        return False
    try:
        return bool(value.isascii() or value.encode())
    except UnicodeEncodeError:  # two halves of a character would come back as one
        return False


def _are_json(values: list[Any]) -> bool:
    """Return whether all values of a list have a notation in JSON; fast, for the histories that scripts keep."""
    kinds = set(map(type, values))
    if not kinds <= {int, float, bool, type(None)}:
        return False
    return all(
        (type(v) is not int or -_SMALL <= v < _SMALL) and (type(v) is not float or not math.isnan(v)) for v in values
    )


def _name_of(key: Any, number: int) -> str:
    if type(key) is int and -_SMALL <= key < _SMALL:
        return str(key)
    if type(key) is str and _is_json(key, str):
        return key[:_LONGEST_NAME]
    return f"key {number}"


def _unwritable(tensor: Tensor) -> str:
    """Return why a tensor cannot be saved; empty if it can."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return f"of the class {type(tensor).__qualname__}"
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else f"of layout {tensor.layout}"
        return f"that is not dense: {kind}"
    if tensor.is_meta:
        return "without values (device meta)"
    if tensor.grad_fn is not None:
        return "that is part of a graph: save tensor.detach()"
    return "with named dimensions" if any(getattr(tensor, "names", ())) else ""


class Made:
    """What has been read so far; one serves the trees of one ``Memo``, in their order."""

    def __init__(self, tensors: Mapping[str, Tensor], known: Mapping[str, Any] | None = None) -> None:
        """Read with ``tensors`` by name, and the objects of the names that ``Memo.know`` was given."""
        self._tensors, self._known = tensors, known or {}
        self._made: list[Any] = []

    def decode(self, tree: Any) -> Any:
        """Return the value of a tree of ``encode``.

        Raises:
            ValueError: ``tree`` is not one, or names what is missing; forged trees raise other errors of Python, NumPy and torch.
        """
        if isinstance(tree, list):
            made: Any = self._new([])
            made.extend(map(self.decode, tree))
            return made
        if not isinstance(tree, dict):
            return tree
        if MARK not in tree:
            made = self._new({})
            for key, item in tree.items():
                made[key] = self.decode(item)
            return made
        kind, value = tree[MARK], tree.get("value")
        if not isinstance(kind, str):
            raise ValueError(f"unknown kind of value {str(kind)[:40]!r}")
        if kind == "same":
            if type(value) is not int or not 0 <= value < len(self._made):
                raise ValueError(f"no value {str(value)[:40]} was read before")
            return self._made[value]
        if kind == "known":
            return self._known[str(value)]
        if kind in VALUES:
            return VALUES[kind].make(*map(self.decode, _list(value)))
        if kind in OBJECTS:
            return self._new(OBJECTS[kind].make(*map(self.decode, _list(value))))
        return self._container(kind, tree, value)

    def _new(self, value: Any) -> Any:
        self._made.append(value)
        return value

    def _container(self, kind: str, tree: Entry, value: Any) -> Any:
        if kind in ("tuple", "frozenset"):
            return self._new((tuple if kind == "tuple" else frozenset)(map(self.decode, _list(value))))
        if kind in DICTS:
            return self._dict(kind, tree, _list(value))
        if kind == "set":
            made: Any = self._new(set())
            made.update(map(self.decode, _list(value)))
        elif kind == "deque":
            made = self._new(deque(maxlen=tree.get("most")))
            made.extend(map(self.decode, _list(value)))
        elif kind == "namespace":
            made = self._new(SimpleNamespace())
            self._fill(made.__dict__, _list(value))
        elif kind == "scalar":
            made = make_scalar(*_list(value))
        elif kind == "dtype":
            made = numpy_dtype(str(value))
        else:
            made = self._array(kind, tree, value)
        return made

    def _array(self, kind: str, tree: Entry, value: Any) -> Any:
        if kind == "array":
            return self._new(read_array(tree, self._tensors))
        if kind == "shard":
            shape, at = (tuple(map(int, tree[key])) for key in ("shape", "at"))
            return Shard(self.decode(tree["part"]), shape, at)
        if kind == "masked":
            return self._masked(*_list(value))
        if kind != "tensor":
            raise ValueError(f"unknown kind of value {kind[:40]!r}")
        tensor = read_tensor(tree, self._tensors)
        if tree.get("parameter"):
            tensor = nn.Parameter(tensor, requires_grad=bool(tree.get("requires_grad")))
        elif tree.get("requires_grad"):
            tensor.requires_grad_()
        self._new(tensor)
        if "grad" in tree:
            tensor.grad = self.decode(tree["grad"])
        return tensor

    def _masked(self, data: Any, mask: Any, fill: Any, hard: Any) -> Any:
        number = len(self._made)
        self._made.append(None)
        values, hidden = self.decode(data), self.decode(mask)
        made = np.ma.MaskedArray(
            values, np.ma.nomask if hidden is None else hidden, fill_value=self.decode(fill), hard_mask=bool(hard)
        )
        self._made[number] = made
        return made

    def _dict(self, kind: str, tree: Entry, pairs: list[Any]) -> Any:
        if kind == "defaultdict":
            calls = tree.get("calls")
            made = self._new(DICTS[kind](None if calls is None else FACTORIES[calls]))
        else:
            made = self._new(DICTS[kind]())
        self._fill(made, pairs)
        if "attributes" in tree:
            self._fill(made.__dict__, _list(tree["attributes"]))
        return made

    def _fill(self, made: dict[Any, Any], pairs: list[Any]) -> None:
        for key, item in pairs:
            name = self.decode(key)
            made[name] = self.decode(item)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"no list of parts: {str(value)[:40]}")
    return value


class Shard(NamedTuple):
    """A part of a tensor."""

    part: Tensor
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    at: tuple[int, ...]
    """The part's first index in the whole tensor."""


def shard_of(tensor: Any) -> Shard:
    """Return this process's part of a sharded tensor."""
    return Shard(local(tensor).detach(), tuple(tensor.shape), _begin(tensor))


def placed(value: Any, like: Any) -> Any:
    """Return a saved shard or whole tensor, sharded like ``like``; a value of another shape as it is.

    Raises:
        SnapshotError: the shard belongs to another division of the tensor among processes.
    """
    if isinstance(value, Shard):
        here = local(like) if isinstance(like, Tensor) and is_shared(like) else None
        if here is None or value.part.shape != here.shape or value.at != _begin(like):
            raise SnapshotError(
                "its shards are divided among processes in another way than this session's",
                hint="load the folder that contains the files of all processes",
            )
        return shared_as(like, value.part.to(here.device))
    if isinstance(value, Tensor) and isinstance(like, Tensor) and is_shared(like) and not is_shared(value):
        if value.shape != like.shape:
            return value
        own = tuple(slice(n, n + size) for n, size in zip(_begin(like), local(like).shape, strict=True))
        return shared_as(like, value[own].to(local(like).device).clone())
    return value


def placed_model(saved: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return a model's saved state, each tensor sharded like the model's own."""
    own = model.state_dict()
    return {name: placed(value, own.get(name)) for name, value in saved.items()}


def placed_optimizer(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's saved state, each tensor sharded like its parameter, but for what each process has whole."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    by_number = dict(zip(numbers, trained_by([optimizer]), strict=False))

    def as_kept(number: Any, name: str, value: Any) -> Any:
        parameter = by_number.get(number)
        whole = (
            parameter is not None
            and isinstance(optimizer, OnePass)
            and optimizer.whole_shape(parameter, name) is not None
        )
        return value if whole else placed(value, parameter)

    state = {
        number: {name: as_kept(number, name, value) for name, value in values.items()}
        for number, values in saved["state"].items()
    }
    return {**saved, "state": state}


def whole(parts: Sequence[Any]) -> Any:
    """Join the states of all processes into one, with whole tensors instead of shards; other values are the first process's."""
    first = parts[0]
    if isinstance(first, Shard):
        full = torch.empty(first.shape, dtype=first.part.dtype)
        for shard in parts:
            full[tuple(slice(n, n + size) for n, size in zip(shard.at, shard.part.shape, strict=True))] = shard.part
        return full
    if isinstance(first, dict):
        return type(first)((key, whole([part[key] for part in parts])) for key in first)
    if isinstance(first, (list, tuple)):
        return type(first)(whole(items) for items in zip(*parts, strict=True))
    return first


def _begin(tensor: Any) -> tuple[int, ...]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, begin = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(begin)
