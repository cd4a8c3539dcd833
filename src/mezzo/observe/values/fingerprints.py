"""Fingerprints of tensors, computed on their device and read from it once a step.

Sums are in FP64 (on the CPU if the device has none), so that a difference of one unit in the last place of one element shows. Elements
count in the order of their indices, whatever their strides. On a CPU one pass of a compiled kernel takes contiguous tensors of FP32, FP16
and BF16; others take three passes of torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mezzo.devices import has_fp64
from mezzo.engine.kernels import cpu
from mezzo.engine.processes.shards import local
from mezzo.formats import format_of
from mezzo.observe.tensors import bit_weights, format_name, sum_of_bits
from mezzo.observe.values.log import BUCKETS, NUMBERS, Floats, Output

_LEAST = 2**16


class Fingerprints:
    """The fingerprints of a run, which stay on the device until they are read."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, Any]] = []
        self._hashes: list[int] = []
        self._numbers: list[Floats] = []
        self._signs: dict[torch.device, Tensor] = {}
        self._weights: dict[torch.device, Tensor] = {}

    def __len__(self) -> int:
        return len(self._hashes) + len(self._waiting)

    def add(self, tensor: Tensor, *, rounding_of: Tensor | None = None) -> Output:
        """Take the fingerprint of a tensor as the next row; return what it describes.

        Args:
            tensor: any dense or sparse tensor of numbers.
            rounding_of: the tensor whose rounding affects the elements, if that is not the tensor itself.
        """
        values = dense(tensor)
        rounded = values if rounding_of is None else dense(rounding_of)
        known = format_of(rounded.dtype)
        unit = 0.0 if known is None else known.eps / 2
        if cpu.takes_values(values):
            bits, (squares, fourths, *sketch) = cpu.fingerprint(
                values, self._signs_for(values.device, values.numel()), buckets=BUCKETS
            )
            norm = squares if rounding_of is None else float(_squares(rounded))
            numbers = np.array([squares, norm * unit**2, fourths, *sketch])
            self._waiting.append((bits, numbers))
        else:
            wide = flat_fp64(values)
            powers = wide * wide
            norm_there = powers.sum() if rounding_of is None else _squares(rounded)
            sums = torch.stack([powers.sum(), norm_there * unit**2, powers.dot(powers)])
            self._waiting.append(
                (sum_of_bits(values, self._weights_for(values)), torch.cat([sums, self._sketch(wide)]))
            )
        return Output(format_name(tensor.dtype), tuple(tensor.shape))

    def _sketch(self, wide: Tensor) -> Tensor:
        size = wide.numel()
        signed = wide * self._signs_for(wide.device, size)
        sketch = torch.zeros(BUCKETS, dtype=torch.float64, device=wide.device)
        whole = size - size % BUCKETS
        if whole:
            sketch += signed[:whole].view(-1, BUCKETS).sum(0)
        sketch[: size - whole] += signed[whole:]
        return sketch

    def forget_after(self, count: int) -> None:
        """Drop all rows but the first ``count``."""
        self.read()
        del self._hashes[count:], self._numbers[count:]

    def read(self) -> tuple[list[int], Floats]:
        """Return hashes and numbers of all rows; waits for the device."""
        on_device = [n for n, (bits, _) in enumerate(self._waiting) if isinstance(bits, Tensor)]
        if on_device:
            hashes = torch.stack([self._waiting[n][0].cpu() for n in on_device]).tolist()
            numbers = torch.stack([self._waiting[n][1].cpu() for n in on_device]).numpy()
            for n, bits, row in zip(on_device, hashes, numbers, strict=True):
                self._waiting[n] = bits, row
        for bits, row in self._waiting:
            assert isinstance(bits, int)
            self._hashes.append(bits)
            self._numbers.append(row)
        self._waiting = []
        return self._hashes, np.array(self._numbers).reshape(-1, NUMBERS)

    def _weights_for(self, values: Tensor) -> Tensor:
        device, size = values.device, values.numel()
        if device not in self._weights or len(self._weights[device]) < size:
            self._weights[device] = bit_weights(max(_LEAST, 2 * size), device)
        return self._weights[device]

    def _signs_for(self, device: torch.device, size: int) -> Tensor:
        known = self._signs.get(device)
        if known is None or len(known) < size:
            known = self._signs[device] = torch.from_numpy(_signs(max(_LEAST, 2 * size))).to(device)
        return known[:size]


def dense(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor: of a sharded one its local part, of a sparse one its values, of a complex one its parts."""
    values = local(tensor).detach()
    if values.layout is torch.sparse_coo:
        values = values.coalesce().values()
    values = values.resolve_conj().resolve_neg()
    return torch.view_as_real(values) if values.is_complex() else values


def flat_fp64(values: Tensor) -> Tensor:
    """Return the elements in one dimension, in FP64."""
    on = values if has_fp64(values.device) else values.cpu()
    return on.reshape(-1).double()


def _squares(values: Tensor) -> Tensor:
    wide = flat_fp64(values)
    return wide.dot(wide)


def _signs(size: int) -> npt.NDArray[np.int8]:
    """Return a fixed random sign for each index: the top bit of SplitMix64, so that every machine has the same."""
    mixed = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.where((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(63), 1, -1).astype(np.int8)
