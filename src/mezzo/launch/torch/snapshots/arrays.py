"""NumPy's arrays and generators in snapshots: written by their bytes, views as views, and filled in place where set-up made them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mezzo.engine.snapshots.memory import dtype_text, numpy_dtype
from mezzo.launch.torch.snapshots.known_types import bytes_of

if TYPE_CHECKING:
    from mezzo.launch.torch.snapshots.restore import Restoration
    from mezzo.launch.torch.snapshots.walk import Walk


def written_array(walk: Walk, value: Any) -> tuple[str, Any]:
    """Return the kind and the state of an array."""
    if isinstance(value, np.ma.MaskedArray):
        mask = None if value.mask is np.ma.nomask else np.array(value.mask)
        fill: Any = vars(value)["_fill_value"]  # reading fill_value would set it
        parts = {"data": np.array(value.data), "mask": mask, "fill": fill}
        return "masked", {name: walk.ref(part, name) for name, part in parts.items()} | {"hard": value.hardmask}
    if isinstance(value, np.memmap) or isinstance(value.base, np.memmap):
        if value.flags.writeable:
            raise walk.refusal(value, "it writes to its file, which is not seen; open it with mode 'r'")
        return walk.opaque_state(value)
    if type(value) is not np.ndarray:
        return walk.unknown_state(value)
    if value.dtype.hasobject:
        if value.dtype != object:
            raise walk.refusal(value, "it has objects in a structure")
        items = [walk.ref(one, f"[{n}]") for n, one in enumerate(value.reshape(-1))]
        return "objects", {"shape": list(value.shape), "items": items}
    owner, at = _memory_of(value)
    if owner is not value:
        return "array view", {
            "of": walk.ref(owner, "base"), "at": at, "format": dtype_text(value.dtype), "shape": list(value.shape),
            "strides": list(value.strides), "writes": bool(value.flags.writeable),
        }  # fmt: skip
    if walk.is_base:
        walk.note_checksum(value)
        return "array", {}
    if walk.is_old:
        return "array", walk.changed(value, lambda: bytes_of(value))
    return "array", {
        "format": dtype_text(value.dtype),
        "shape": list(value.shape),
        "order": "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C",
        "data": walk.keep(bytes_of(value)),
        "writes": bool(value.flags.writeable),
    }


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


def new_array(restoration: Restoration, state: Any) -> Any:
    """Return an array that set-up has not made."""
    data = restoration.tensors[state["data"]].numpy().tobytes()
    dtype: Any = numpy_dtype(state["format"])
    new = np.ndarray(state["shape"], dtype, bytearray(data) or bytearray(1)).copy(order="C")
    new = new if state["order"] == "C" else np.asfortranarray(new)
    new.flags.writeable = state["writes"]
    return new


def new_view(restoration: Restoration, state: Any) -> Any:
    """Return an array that looks into another one's memory."""
    owner = restoration.value(state["of"])
    if isinstance(owner, Tensor):
        whole = torch.empty(0, dtype=torch.uint8).set_(owner.untyped_storage())
        memory: Any = whole.numpy()
    else:
        memory = owner if owner.flags.c_contiguous else owner.T
    dtype: Any = numpy_dtype(state["format"])
    new: Any = np.ndarray(state["shape"], dtype, memory, state["at"], state["strides"])
    if not state["writes"]:
        new.flags.writeable = False
    return new


def fill_array(restoration: Restoration, value: Any, state: Any) -> None:
    """Give an array of set-up its elements."""
    if "data" in state and "format" not in state:
        data = restoration.tensors[state["data"]].numpy().tobytes()
        if value.tobytes() != data:
            value[...] = np.ndarray(value.shape, value.dtype, bytearray(data) or bytearray(1))


def new_masked(restoration: Restoration, state: Any) -> Any:
    """Return a masked array."""
    new: Any = np.ma.MaskedArray(restoration.value(state["data"]).copy())
    fill_masked(restoration, new, state)
    return new


def fill_masked(restoration: Restoration, value: Any, state: Any) -> None:
    """Give a masked array its elements, its mask and its other settings."""
    value.soften_mask()
    mask = restoration.value(state["mask"])
    value.mask = np.ma.nomask
    value._data[...] = restoration.value(state["data"])
    if mask is not None:
        value.mask = mask
    # None: NumPy's own, which may be longer than the elements.
    vars(value)["_fill_value"] = restoration.value(state["fill"])
    if state["hard"]:
        value.harden_mask()


def written_random(walk: Walk, value: Any) -> tuple[str, Any]:
    """Return the kind and the state of a random generator."""
    state: dict[str, Any] = {"class": walk.ref(type(value), "class")}
    if isinstance(value, random.SystemRandom):
        return "system random", state
    if isinstance(value, torch.Generator):
        return "random", state | {"device": str(value.device), "state": walk.ref(value.get_state(), "state")}
    if isinstance(value, random.Random):
        return "random", state | {"state": walk.ref(value.getstate(), "state")}
    if isinstance(value, np.random.RandomState):
        held: Any = value.get_state(legacy=False)
        if held["bit_generator"] != "MT19937":
            raise walk.refusal(value, f"it draws from {held['bit_generator']}")
        return "random", state | {"state": walk.ref(held, "state")}
    bits = value.bit_generator
    state |= {"bits": walk.ref(type(bits), "bits"), "state": walk.ref(bits.state, "state")}
    seeds = bits.seed_seq
    if type(seeds) is np.random.SeedSequence:
        parts = [seeds.entropy, seeds.spawn_key, seeds.pool_size, seeds.n_children_spawned]
        state["seeds"] = walk.ref(parts, "seeds")
    return "random", state


def fill_random(restoration: Restoration, value: Any, state: Any) -> None:
    """Give a random generator its state."""
    saved = restoration.value(state["state"])
    if isinstance(value, (torch.Generator, np.random.RandomState)):
        value.set_state(saved)
    elif isinstance(value, random.Random):
        value.setstate(saved)
    elif "seeds" in state:
        entropy, key, pool, children = restoration.value(state["seeds"])
        seeds = np.random.SeedSequence(entropy, spawn_key=key, pool_size=pool, n_children_spawned=children)
        bits: Any = value.bit_generator
        bits.__setstate__((saved, seeds))
    else:
        value.bit_generator.state = saved
