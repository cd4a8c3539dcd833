"""Memory of a tape on one GPU: the bytes of its tensors, the bytes that the allocator reserves, and whether they fit."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mezzo.measure.predict.tape import TrainingTape

# ``nvidia-smi`` shows what the allocator has reserved, not what tensors fill, and the difference is 15% in the median of 65
# measured trainings. So the trace is replayed by the allocator's rules (``c10/cuda/CUDACachingAllocator.cpp``, torch 2.13):
#
# - A size is rounded up to 512 bytes.
# - A block of at most 1 MiB comes from a segment of 2 MiB; below 10 MiB, from one of 20 MiB; otherwise it gets a segment of
#   its own, rounded up to 2 MiB. Small and large segments are separate pools.
# - The smallest free block that fits is taken, the lowest address first. It is split if the rest is at least 512 bytes in the
#   small pool, more than 1 MiB in the large one.
# - Freed blocks merge with free neighbours of their segment. Segments stay reserved.
# - If the device has no room for a new segment, all wholly free segments are returned to it, once; then the allocation fails.
#
# Limits: one stream, no expandable segments, no ``max_split_size_mb``, no garbage-collection threshold; the device itself never
# fragments.

MIB = 1 << 20
_UNIT_BYTES = 512
_SMALL_BYTES = MIB
_SMALL_SEGMENT_BYTES = 2 * MIB
_LARGE_SEGMENT_BYTES = 20 * MIB
_OWN_SEGMENT_BYTES = 10 * MIB
_OWN_SEGMENT_UNIT_BYTES = 2 * MIB


class SimulatedOutOfMemory(Exception):
    """The simulated device has no room for an allocation."""


@dataclass(eq=False)
class SegmentBlock:
    """A stretch of a segment, in use or free."""

    address: int
    size_bytes: int
    small: bool
    free: bool = False
    before: SegmentBlock | None = field(default=None, repr=False)
    """The neighbour below in the same segment."""
    after: SegmentBlock | None = field(default=None, repr=False)


class CachingAllocator:
    """The state of one GPU's memory."""

    def __init__(self, *, limit_bytes: int | None = None) -> None:
        """Create an empty device with ``limit_bytes`` for segments; None for one without a limit."""
        self._limit_bytes = limit_bytes
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._blocks: dict[int, SegmentBlock] = {}
        self._next_address = 0
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0

    def allocate(self, size_bytes: int) -> SegmentBlock:
        """Return a block of at least ``size_bytes``.

        Raises:
            SimulatedOutOfMemory: the device has no room, not even without its free segments.
        """
        size = rounded_bytes(size_bytes)
        small = size <= _SMALL_BYTES
        pool = self._free[small]
        index = bisect_left(pool, (size, 0))
        block = self._blocks[pool.pop(index)[1]] if index < len(pool) else self._new_segment(size, small)
        self._split(block, size)
        block.free = False
        self.allocated_bytes += block.size_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def release(self, block: SegmentBlock) -> None:
        """Free ``block`` and merge it with its free neighbours."""
        self.allocated_bytes -= block.size_bytes
        if (before := block.before) is not None and before.free:
            self._remove_free(before)
            block = self._merged(before, block)
        if (after := block.after) is not None and after.free:
            self._remove_free(after)
            block = self._merged(block, after)
        block.free = True
        insort(self._free[block.small], (block.size_bytes, block.address))

    def _new_segment(self, size: int, small: bool) -> SegmentBlock:
        segment = segment_bytes(size)
        if not self._has_room(segment):
            self._release_free_segments()
            if not self._has_room(segment):
                raise SimulatedOutOfMemory
        block = SegmentBlock(self._next_address, segment, small)
        self._blocks[block.address] = block
        self._next_address += segment
        self.reserved_bytes += segment
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return block

    def _has_room(self, segment: int) -> bool:
        return self._limit_bytes is None or self.reserved_bytes + segment <= self._limit_bytes

    def _release_free_segments(self) -> None:
        for pool in self._free.values():
            for entry in list(pool):
                block = self._blocks[entry[1]]
                if block.before is None and block.after is None:  # a whole segment
                    pool.remove(entry)
                    del self._blocks[block.address]
                    self.reserved_bytes -= block.size_bytes

    def _split(self, block: SegmentBlock, size: int) -> None:
        rest = block.size_bytes - size
        if rest < _UNIT_BYTES if block.small else rest <= _SMALL_BYTES:
            return
        other = SegmentBlock(block.address + size, rest, block.small, free=True, before=block, after=block.after)
        if block.after is not None:
            block.after.before = other
        block.after, block.size_bytes = other, size
        self._blocks[other.address] = other
        insort(self._free[block.small], (rest, other.address))

    def _remove_free(self, block: SegmentBlock) -> None:
        pool = self._free[block.small]
        del pool[bisect_left(pool, (block.size_bytes, block.address))]

    def _merged(self, low: SegmentBlock, high: SegmentBlock) -> SegmentBlock:
        del self._blocks[high.address]
        low.size_bytes += high.size_bytes
        low.after = high.after
        if high.after is not None:
            high.after.before = low
        return low


def rounded_bytes(size_bytes: int) -> int:
    """Return the bytes that an allocation of ``size_bytes`` takes."""
    return max(_UNIT_BYTES, -(-size_bytes // _UNIT_BYTES) * _UNIT_BYTES)


def segment_bytes(size_bytes: int) -> int:
    """Return the size of a new segment for a block of ``size_bytes``."""
    if size_bytes <= _SMALL_BYTES:
        return _SMALL_SEGMENT_BYTES
    if size_bytes < _OWN_SEGMENT_BYTES:
        return _LARGE_SEGMENT_BYTES
    return -(-size_bytes // _OWN_SEGMENT_UNIT_BYTES) * _OWN_SEGMENT_UNIT_BYTES


CUBLAS_WORKSPACE_BYTES = 8_519_680
"""Workspace of one cuBLAS handle on compute capability 8.x (``CUDABlas.cpp``: 4 x 2 MiB + 8 x 16 KiB, rounded up)."""
CUBLAS_WORKSPACE_HOPPER_BYTES = 32 * MIB
DRIVER_BYTES = 500 * MIB
"""What the driver and CUDA's context occupy; an assumption."""


@dataclass(frozen=True, kw_only=True)
class PredictedMemory:
    """Peaks of a training."""

    allocated_bytes: int
    """As ``torch.cuda.max_memory_allocated`` returns."""
    reserved_bytes: int
    """As ``torch.cuda.max_memory_reserved`` returns."""
    fits: bool
    by_kind_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes by kind at the moment of the largest allocation."""


def predict_memory(
    tape: TrainingTape,
    *,
    limit_bytes: int | None = None,
    workspace_bytes: int = CUBLAS_WORKSPACE_BYTES,
    matrix_formats: Collection[str] = (),
) -> PredictedMemory:
    """Return the peaks of ``tape``, replayed through the caching allocator.

    Args:
        tape: the training.
        limit_bytes: the memory that the allocator may reserve; None for any amount.
        workspace_bytes: the size of a cuBLAS workspace, of which there are two.
        matrix_formats: the formats of the device's matrix units: cuDNN copies channels-first operands of convolutions in these.

    A cuDNN workspace that does not fit is not an error: torch catches it and tries the next algorithm (``Conv_v8.cpp``).
    """
    allocator = CachingAllocator(limit_bytes=limit_bytes)
    live: dict[int, SegmentBlock] = {}
    absent: set[int] = set()
    fits = True
    peak, at_peak = 0, 0
    for index, event in enumerate(tape.events):
        if event < 0:
            if ~event not in absent:
                allocator.release(live.pop(~event))
            continue
        block = tape.blocks[event]
        if not block.is_taken(matrix_formats):
            absent.add(event)
            continue
        try:
            live[event] = allocator.allocate(block.size_bytes or workspace_bytes)
        except SimulatedOutOfMemory:
            if block.kind != "workspaces" or not block.size_bytes:
                fits = False
                break
            absent.add(event)
        if allocator.allocated_bytes > peak:
            peak, at_peak = allocator.allocated_bytes, index
    return PredictedMemory(
        allocated_bytes=allocator.peak_allocated_bytes,
        reserved_bytes=allocator.peak_reserved_bytes,
        fits=fits,
        by_kind_bytes=bytes_by_kind(tape, until=at_peak, absent=absent),
    )


def bytes_by_kind(tape: TrainingTape, *, until: int, absent: Collection[int] = ()) -> dict[str, int]:
    """Return the allocated bytes by kind after event number ``until``, without the blocks in ``absent``."""
    alive: set[int] = set()
    for event in tape.events[: until + 1]:
        alive.add(event) if event >= 0 else alive.discard(~event)
    found: dict[str, int] = {}
    for number in alive.difference(absent):
        block = tape.blocks[number]
        found[block.kind] = found.get(block.kind, 0) + block.size_bytes
    return found


# Matrix units work channels-last. For channels-first operands cuDNN makes "NCHW-to-NHWC transformations to call the Tensor Core
# operations" (its documentation of formats), so the workspace contains input, weight and result a second time. A window of one point
# needs none: such a convolution is a product of the weight with each image as it is stored. Nor do groups, which matrix units do not
# compute.
#
# When it may try its algorithms (``torch.backends.cudnn.benchmark``), the largest buffer among the usual ones is Winograd's,
# kept apart from its products (NVIDIA's documentation calls it WINOGRAD_NONFUSED: "a significant workspace may be needed"). It contains
# the transformed input, weight and result. By Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2016),
# F(4x4, 3x3), a tile of 4x4 results needs 6x6 transformed values of each channel in and out, and each pair of channels 6x6 transformed
# weights; the two gradients need as many.

aten: Any = torch.ops.aten
_LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}
_TILE, _TRANSFORMED, _WINDOW = 4, 6 * 6, (3, 3)


def copied_bytes(func: Any, args: Any, result: Any) -> int:
    """Return the bytes of a channels-first convolution's operands in the other layout, or of a gradient's; 0 where none is copied."""
    if func.overloadpacket is aten.convolution:
        operands, groups = (*args[:2], result), args[8]
    elif func.overloadpacket is aten.convolution_backward:
        operands, groups = (args[1], args[2], args[0]), args[9]  # both gradients have the same three sizes
    else:
        return 0
    x, weight, _ = operands
    if groups != 1 or math.prod(weight.shape[2:]) == 1 or _is_channels_last(x):
        return 0
    return sum(t.numel() * t.element_size() for t in operands)


def _is_channels_last(x: Tensor) -> bool:
    layout = _LAYOUTS.get(x.dim())
    return layout is not None and not x.is_contiguous() and x.is_contiguous(memory_format=layout)


def trial_bytes(func: Any, args: Any) -> int:
    """Return the bytes of Winograd's buffers for a convolution, or for a gradient of one; 0 where it does not apply."""
    input_at = {aten.convolution: 0, aten.convolution_backward: 1}.get(func.overloadpacket)
    if input_at is None:
        return 0
    # a gradient's arguments begin with the gradient of the result, and have the sizes of the bias before the stride
    x, weight = args[input_at : input_at + 2]
    stride, padding, dilation, transposed, _, groups = args[input_at + 3 : input_at + 9]
    plain = set(stride) == {1} and set(dilation) == {1} and groups == 1 and not transposed
    if not plain or tuple(weight.shape[2:]) != _WINDOW:
        return 0
    sides = [size + 2 * pad - 2 for size, pad in zip(x.shape[2:], padding, strict=True)]
    tiles = x.shape[0] * math.prod(-(-side // _TILE) for side in sides)
    out_channels, in_channels = weight.shape[:2]
    return int(_TRANSFORMED * (tiles * (in_channels + out_channels) + in_channels * out_channels) * x.element_size())
