"""Tensors, NumPy's arrays and random generators in snapshots: views as views, and filled in place where set-up made them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mezzo.engine.processes.shards import is_shared
from mezzo.engine.snapshots.kinds import can_be_written, dtype_text, numpy_dtype
from mezzo.errors import SnapshotError
from mezzo.launch.torch.snapshots.known_types import Described, Parts, bytes_of, elements_of
from mezzo.launch.torch.snapshots.walk import ObjectKind, RowParts, Turn, Walk

# --- tensors ---------------------------------------------------------------------------------------------------------------


def tensor(walk: Walk, value: Tensor) -> Described:
    """Describe a tensor."""
    if is_shared(value):
        return _shared(walk, value)
    foreign = type(value).__module__.startswith(("torchao", "torch.masked", "torch.nested")) or value.is_quantized
    if foreign or not can_be_written(value.dtype):
        return walk.unknown(value)
    if value.is_meta or value.is_conj() or value.is_neg() or value.is_nested or value.layout is not torch.strided:
        return walk.unknown(value)
    grad = value.grad if value.is_leaf else None
    parts: Parts = {"grad": grad, "trains": value.requires_grad, "leaf": value.is_leaf}
    if type(value) is not Tensor:
        parts["class"] = type(value)
    if value.__dict__:
        parts["attributes"] = walk.named(value.__dict__)
    place = (str(value.device), value.untyped_storage().data_ptr())
    if walk.is_base:
        walk.storages.setdefault(place, walk.now)
    if walk.is_old:
        return "tensor", parts | walk.elements(value, lambda: elements_of(value), trains=value.requires_grad)
    return "tensor", parts | _memory(walk, value, place)


def _memory(walk: Walk, value: Tensor, place: tuple[str, int]) -> Parts:
    """Return the memory of a younger tensor, which others may share, and its place in it."""
    assert walk.base is not None
    parts: Parts = {"format": value.dtype, "offset": value.storage_offset()}
    parts |= {"shape": value.shape, "strides": torch.Size(value.stride())}
    old = walk.base.storages.get(place)
    if old is not None and old < walk.limit and value.numel():
        return parts | {"base": walk.base.objects[old]}
    name = f"storage {place[0]} {place[1]}" if value.numel() else f"empty {walk.now}"
    if name not in walk.tensors:
        whole = torch.empty(0, dtype=torch.uint8, device=value.device)
        walk.tensors[name] = whole.set_(value.untyped_storage())
    return parts | {"storage": name, "device": value.device}


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


def _new_tensor(state: RowParts) -> Any:
    storages = state.restoration.storages
    if "base" in state:
        storage = state["base"].untyped_storage()
    else:
        name = state["storage"]
        if name not in storages:
            storages[name] = state.restoration.tensors[name].to(state["device"]).clone().untyped_storage()
        storage = storages[name]
    new = torch.empty(0, dtype=state["format"], device=storage.device)
    new.set_(storage, state["offset"], state["shape"], state["strides"])
    cls, trains = state.get("class", Tensor), state["trains"]
    if not state["leaf"] and trains:
        return _Lost.apply(new.requires_grad_())
    if issubclass(cls, torch.nn.Parameter):
        made = torch.nn.Parameter(new, trains)
        return made if cls is torch.nn.Parameter else made.as_subclass(cls)
    return (new if cls is Tensor else new.as_subclass(cls)).requires_grad_(trains)


@torch.no_grad()
def _fill_tensor(value: Any, state: RowParts) -> None:
    if "data" in state:
        saved, own = state["data"], elements_of(value)
        if saved.shape == own.shape and saved.dtype is value.dtype:
            own.copy_(saved)
        else:
            value.data = saved.to(value.device)
    if state["leaf"] and value.is_leaf:
        if value.requires_grad != state["trains"]:
            value.requires_grad_(state["trains"])
        value.grad = state["grad"]
    value.__dict__.update(state.get("attributes", {}))


def _shared(walk: Walk, value: Any) -> Described:
    """A tensor that is spread over processes: the part of this one; a younger one is spread like one of set-up."""
    grad = value.grad if value.is_leaf else None
    parts = {"part": value._local_tensor, "trains": value.requires_grad, "grad": grad}
    if walk.base is None or walk.is_old:
        return "shared tensor", parts
    old = (one for one in walk.base.objects[: walk.limit] if isinstance(one, Tensor) and is_shared(one))
    like = next((one for one in old if one._spec == value._spec), None)  # type: ignore[attr-defined]
    if like is None:
        raise walk.refusal(value, "no tensor of set-up is spread over the processes like it")
    return "shared tensor", parts | {"like": like}


def _new_shared(state: RowParts) -> Any:
    like = state["like"]
    return type(like)(state["part"], like._spec, requires_grad=state["trains"])


def _fill_shared(value: Any, state: RowParts) -> None:
    value.grad = state["grad"]


# --- arrays ----------------------------------------------------------------------------------------------------------------


def array(walk: Walk, value: Any) -> Described:
    """Describe an array of NumPy."""
    if isinstance(value, np.ma.MaskedArray):
        mask = None if value.mask is np.ma.nomask else np.array(value.mask)
        fill: Any = vars(value)["_fill_value"]  # reading fill_value would set it
        return "masked", {"data": np.array(value.data), "mask": mask, "fill": fill, "hard": value.hardmask}
    if isinstance(value, np.memmap) or isinstance(value.base, np.memmap):
        if value.flags.writeable:
            raise walk.refusal(value, "it writes to its file, which is not seen; open it with mode 'r'")
        return walk.unchanged(value)
    if type(value) is not np.ndarray:
        return walk.unknown(value)
    if value.dtype.hasobject:
        if value.dtype != object:
            raise walk.refusal(value, "it has objects in a structure")
        return "objects", {"shape": torch.Size(value.shape), "items": walk.items(value.reshape(-1))}
    owner, at = _memory_of(value)
    is_view = owner is not value
    if walk.is_old and not is_view:
        return "array", walk.elements(value, lambda: bytes_of(value))
    order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    about: Parts = {"format": dtype_text(value.dtype), "shape": torch.Size(value.shape)}
    about["writes"] = bool(value.flags.writeable)
    if is_view:
        return "array view", about | {"base": owner, "at": at, "strides": torch.Size(value.strides)}
    return "array", about | {"order": order, "data": walk.data(bytes_of(value))}


def _memory_of(value: Any) -> tuple[Any, int]:
    """Return the array or tensor whose memory an array is a view of, and where in it, in bytes; the array itself if it is none."""
    owner = value
    while type(owner.base) is np.ndarray:
        owner = owner.base
    if isinstance(owner.base, Tensor) and owner.base.device.type == "cpu":
        owner = owner.base
        begin = owner.untyped_storage().data_ptr()
    elif owner is value or owner.dtype.hasobject or not (owner.flags.c_contiguous or owner.flags.f_contiguous):
        return value, 0
    else:
        begin = owner.ctypes.data
    at = value.ctypes.data - begin
    return (owner, at) if at >= 0 and value.size else (value, 0)


def _of_bytes(state: RowParts, shape: Any, dtype: Any) -> Any:
    """Return the saved elements of an array."""
    return np.ndarray(shape, dtype, bytearray(state["data"].numpy().tobytes()) or bytearray(1))


def _new_array(state: RowParts) -> Any:
    new = _of_bytes(state, state["shape"], numpy_dtype(state["format"])).copy(order="C")
    new = new if state["order"] == "C" else np.asfortranarray(new)
    new.flags.writeable = state["writes"]
    return new


def _new_view(state: RowParts) -> Any:
    owner = state["base"]
    if isinstance(owner, Tensor):
        memory: Any = torch.empty(0, dtype=torch.uint8).set_(owner.untyped_storage()).numpy()
    else:
        memory = owner if owner.flags.c_contiguous else owner.T
    dtype: Any = numpy_dtype(state["format"])
    new: Any = np.ndarray(state["shape"], dtype, memory, state["at"], state["strides"])
    if not state["writes"]:
        new.flags.writeable = False
    return new


def _fill_array(value: Any, state: RowParts) -> None:
    if "data" in state and "format" not in state:  # set-up made it
        saved = _of_bytes(state, value.shape, value.dtype)
        if value.tobytes() != saved.tobytes():
            value[...] = saved


def _new_masked(state: RowParts) -> Any:
    new: Any = np.ma.MaskedArray(state["data"].copy())
    _fill_masked(new, state)
    return new


def _fill_masked(value: Any, state: RowParts) -> None:
    value.soften_mask()
    mask = state["mask"]
    value.mask = np.ma.nomask
    value._data[...] = state["data"]
    if mask is not None:
        value.mask = mask
    vars(value)["_fill_value"] = state["fill"]  # None: NumPy's own, which may be longer than the elements
    if state["hard"]:
        value.harden_mask()


def _fill_objects(value: Any, state: RowParts) -> None:
    flat = value.reshape(-1)
    for n, one in enumerate(state["items"]):
        flat[n] = one


# --- random generators -----------------------------------------------------------------------------------------------------


def random_generator(walk: Walk, value: Any) -> Described:
    """Describe a random generator by its state."""
    parts: Parts = {"class": type(value)}
    if isinstance(value, random.SystemRandom):
        return "system random", parts
    if isinstance(value, torch.Generator):
        return "random", parts | {"device": value.device, "state": value.get_state()}
    if isinstance(value, random.Random):
        return "random", parts | {"state": value.getstate()}
    if isinstance(value, np.random.RandomState):
        held: Any = value.get_state(legacy=False)
        if held["bit_generator"] != "MT19937":
            raise walk.refusal(value, f"it draws from {held['bit_generator']}")
        return "random", parts | {"state": held}
    bits = value.bit_generator
    parts |= {"bits": type(bits), "state": bits.state}
    seeds = bits.seed_seq
    if type(seeds) is np.random.SeedSequence:
        parts["seeds"] = [seeds.entropy, seeds.spawn_key, seeds.pool_size, seeds.n_children_spawned]
    return "random", parts


def _new_random(state: RowParts) -> Any:
    cls = state["class"]
    if "device" in state:
        return torch.Generator(state["device"])
    if "bits" in state:
        return np.random.Generator(state.type(np.random.BitGenerator, part="bits")())
    return np.random.RandomState() if cls is np.random.RandomState else random.Random.__new__(cls)


def _fill_random(value: Any, state: RowParts) -> None:
    saved = state["state"]
    if isinstance(value, (torch.Generator, np.random.RandomState)):
        value.set_state(saved)
    elif isinstance(value, random.Random):
        value.setstate(saved)
    elif "seeds" in state:
        entropy, key, pool, children = state["seeds"]
        seeds = np.random.SeedSequence(entropy, spawn_key=key, pool_size=pool, n_children_spawned=children)
        bits: Any = value.bit_generator
        bits.__setstate__((saved, seeds))
    else:
        value.bit_generator.state = saved


KINDS: dict[str, ObjectKind] = {
    "tensor": ObjectKind(_new_tensor, _fill_tensor),
    "shared tensor": ObjectKind(_new_shared, _fill_shared),
    "array": ObjectKind(_new_array, _fill_array),
    "array view": ObjectKind(_new_view),
    "masked": ObjectKind(_new_masked, _fill_masked),
    "objects": ObjectKind(lambda state: np.empty(state["shape"], dtype=object), _fill_objects),
    "random": ObjectKind(_new_random, _fill_random, Turn.AFTER),
    "system random": ObjectKind(lambda state: state.type(random.SystemRandom)()),
}
