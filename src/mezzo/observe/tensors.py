"""Properties of tensors: finite or not, magnitudes, formats, storage."""

from __future__ import annotations

import cmath
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mezzo.devices import has_fp64
from mezzo.engine.processes.shards import local
from mezzo.formats import format_of
from mezzo.observe.trace import CoveredElements
from mezzo.records import Operand

T = TypeVar("T")
_SWEEP = 256
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer formats by their size in bytes."""
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""2^64 over the golden ratio, which SplitMix64 counts in."""


def operand(tensor: Tensor) -> Operand:
    """Return the description of a tensor that an operation read."""
    values = _dense(tensor).detach().reshape(-1)
    finite = values[values.isfinite()].abs()
    return Operand(
        format=format_name(tensor.dtype),
        shape=list(tensor.shape),
        largest=float(finite.max()) if len(finite) else 0.0,
        smallest=float(finite.min()) if len(finite) else 0.0,
        num_not_finite=len(values) - len(finite),
    )


def norm(tensor: Tensor) -> float:
    """Return the norm of a tensor's values, summed in FP64 (on the CPU if the device has no FP64). Waits for the device."""
    wide = tensor.detach() if has_fp64(tensor.device) else tensor.detach().cpu()
    return float(torch.linalg.vector_norm(wide.double()))


def difference(a: Tensor, b: Tensor) -> float:
    """Return the norm of ``a - b``, computed in FP64."""
    a, b = (t.detach() if has_fp64(t.device) else t.detach().cpu() for t in (a, b))
    return float(torch.linalg.vector_norm(a.double() - b.double()))


def bit_weights(size: int, device: torch.device) -> Tensor:
    """Return the weights of ``sum_of_bits`` for ``size`` elements: odd 64-bit integers without a pattern.

    With small weights the signs of four neighbours cancel, 1 - 3 - 5 + 7, so that their opposite has the same sum.
    """
    mixed = torch.arange(1, 2 * size, 2, device=device) * _GOLDEN
    return (mixed ^ _upper_half(mixed)) | 1


def sum_of_bits(values: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of a dense real tensor's bits, element by element, weighted by position, as an integer on its device."""
    bits = values.detach().contiguous().view(_WORDS[values.element_size()]).reshape(-1).long()
    if values.element_size() == 8:  # else an even number of other signs would add nothing: odd times 2^63 is 2^63
        bits = bits ^ _upper_half(bits)
    return (bits * weights[: len(bits)]).sum()


def _upper_half(words: Tensor) -> Tensor:
    return (words >> 32) & 0xFFFFFFFF


def has_floats(tensor: Tensor) -> bool:
    """Return whether a tensor has floating-point values."""
    return tensor.is_floating_point() and readable(tensor)


def readable(tensor: Tensor) -> bool:
    """Return whether a tensor has values: it is neither fake, on the meta device, nor empty."""
    fake = isinstance(tensor, torch._subclasses.FakeTensor) or tensor.is_meta
    return not fake and tensor.numel() > 0


def _dense(tensor: Tensor) -> Tensor:
    dense = tensor if tensor.layout is torch.strided else tensor.coalesce().values()
    return dense if dense.element_size() > 1 else dense.float()


def is_finite(tensor: Tensor) -> bool:
    """Return whether every number is finite; waits for the device."""
    # A sum is finite only if all numbers are: one kernel, and it writes nothing. If it is not, its own range may have been too
    # narrow. 0 times infinity is NaN. On a CPU torch's isfinite takes ten times as long.
    dense = _dense(tensor)
    dense = dense.detach() if dense.requires_grad else dense
    return cmath.isfinite(dense.sum().item()) or not bool((dense * 0).sum())


def has_nan(tensor: Tensor) -> bool:
    """Return whether any number is NaN."""
    return bool(_dense(tensor).isnan().any())


def by_design(tensor: Tensor) -> bool:
    """Return whether non-finite values look intended: a constant of the script, or a mask of -inf."""
    return tensor.numel() == 1 or not bool((_dense(tensor).isnan() | _dense(tensor).isposinf()).any())


def largest(tensor: Tensor) -> float:
    """Return the largest magnitude."""
    return float(_dense(tensor).abs().max())


def format_name(dtype: torch.dtype) -> str:
    """Return the name of the format that a dtype stores; the dtype's own name if it is not a floating-point one."""
    known = format_of(dtype)
    return known.name if known is not None else str(dtype).removeprefix("torch.")


def storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return a tensor's storage, or the storage of a sharded tensor's local part; None for a sparse one or a wrapper around others."""
    try:
        found = local(tensor).untyped_storage()
        found.data_ptr()  # a wrapper's storage exists but has no address
    except (RuntimeError, NotImplementedError):
        return None
    return found


def storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, or the tensor's id if it has none."""
    found = storage(tensor)
    return id(tensor) if found is None else found.data_ptr()


def storage_size(tensor: Tensor) -> int:
    """Return the bytes of a tensor's storage; -1 if it has none of its own."""
    found = storage(tensor)
    return -1 if found is None else found.nbytes()


def region(tensor: Tensor) -> CoveredElements:
    """Return the part of its storage that a tensor covers; () if it has no strides.

    Adjacent dimensions without a gap are merged, so a matrix, its transpose and its flattened view cover the same part.
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        return ()
    spans: list[tuple[int, int]] = []
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if spans and stride == spans[-1][0] * spans[-1][1]:
            spans[-1] = spans[-1][0], spans[-1][1] * size
        else:
            spans.append((stride, size))
    return tensor.storage_offset(), tensor.itemsize, *spans


class Storages(Generic[T]):
    """One value for each live storage; a storage that reuses the memory of a freed one starts without a value."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[StorageWeakRef, T]] = {}  # the reference keeps the key from being reused
        self._sweep_at = _SWEEP

    def __len__(self) -> int:
        return len(self._values)

    def get(self, tensor: Tensor) -> T | None:
        """Return the value for the storage of ``tensor``; None without one."""
        key = _storage_key(tensor)
        found = None if key is None else self._values.get(key)
        return None if found is None else found[1]

    def put(self, tensor: Tensor, value: T) -> None:
        """Keep ``value`` for the storage of ``tensor``, unless it has none (sparse)."""
        key = _storage_key(tensor)
        if key is None:
            return
        if len(self._values) >= self._sweep_at:
            self._values = {n: kept for n, kept in self._values.items() if not kept[0].expired()}
            self._sweep_at = max(_SWEEP, 2 * len(self._values))
        self._values[key] = StorageWeakRef(tensor.untyped_storage()), value

    def change(self, to: Callable[[T], T]) -> None:
        """Replace every value by ``to(value)``, and drop those that become empty."""
        changed = {key: (storage, to(value)) for key, (storage, value) in self._values.items()}
        self._values = {key: kept for key, kept in changed.items() if kept[1]}

    def pop(self, tensor: Tensor) -> None:
        """Drop the value for the storage of ``tensor``."""
        key = _storage_key(tensor)
        if key is not None:
            self._values.pop(key, None)


def _storage_key(tensor: Tensor) -> int | None:
    own = storage(tensor)
    return None if own is None else int(own._cdata)
