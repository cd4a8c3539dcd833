"""Memory of a tape on one GPU: what tensors take, what the allocator reserves, and whether it fits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from mezzo.measure.predict.allocator import MIB, Block, CachingAllocator, OutOfMemory
from mezzo.measure.predict.tape import MemoryBlock, Tape

CUBLAS_WORKSPACE_BYTES = 8_519_680
"""Workspace of one cuBLAS handle on compute capability 8.x (``CUDABlas.cpp``: 4 x 2 MiB + 8 x 16 KiB, rounded up)."""
CUBLAS_WORKSPACE_HOPPER_BYTES = 32 * MIB
DRIVER_BYTES = 500 * MIB
"""What the driver and CUDA's context keep of a card, assumed."""


@dataclass(frozen=True, kw_only=True)
class PredictedMemory:
    """Peaks of a training."""

    allocated_bytes: int
    """What ``torch.cuda.max_memory_allocated`` shows."""
    reserved_bytes: int
    """What ``torch.cuda.max_memory_reserved`` shows."""
    fits: bool
    by_kind_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes by kind at the moment of the largest allocation."""


def predict_memory(
    tape: Tape,
    *,
    limit_bytes: int | None = None,
    workspace_bytes: int = CUBLAS_WORKSPACE_BYTES,
    matrix_formats: Collection[str] = (),
) -> PredictedMemory:
    """Return the peaks of ``tape``, replayed through the caching allocator.

    Args:
        tape: the training.
        limit_bytes: what the device has for the allocator; None for any amount.
        workspace_bytes: the size of a cuBLAS workspace, of which there are two.
        matrix_formats: what the device's matrix units compute: cuDNN copies channels-first operands of convolutions in these.

    A workspace of cuDNN that has no room is not an error: torch catches it and takes the next algorithm (``Conv_v8.cpp``).
    """
    allocator = CachingAllocator(limit_bytes=limit_bytes)
    held: dict[int, Block] = {}
    absent: set[int] = set()
    fits = True
    peak, at_peak = 0, 0
    try:
        for place, event in enumerate(tape.events):
            if event >= 0:
                block = tape.blocks[event]
                if not block.is_taken(matrix_formats) or not _allocated(allocator, held, event, block, workspace_bytes):
                    absent.add(event)
                elif allocator.allocated_bytes > peak:
                    peak, at_peak = allocator.allocated_bytes, place
            elif ~event not in absent:
                allocator.release(held.pop(~event))
    except OutOfMemory:
        fits = False
    return PredictedMemory(
        allocated_bytes=allocator.peak_allocated_bytes,
        reserved_bytes=allocator.peak_reserved_bytes,
        fits=fits,
        by_kind_bytes=bytes_by_kind(tape, until=at_peak, absent=absent),
    )


def _allocated(
    allocator: CachingAllocator, held: dict[int, Block], number: int, block: MemoryBlock, workspace_bytes: int
) -> bool:
    """Allocate ``block`` and return True, or False if it is a workspace of cuDNN that has no room."""
    try:
        held[number] = allocator.allocate(block.size_bytes or workspace_bytes)
    except OutOfMemory:
        if block.kind == "workspaces" and block.size_bytes:
            return False
        raise
    return True


def bytes_by_kind(tape: Tape, *, until: int, absent: Collection[int] = ()) -> dict[str, int]:
    """Return the bytes of each kind that are allocated after event number ``until``, without the blocks that are ``absent``."""
    alive: set[int] = set()
    for event in tape.events[: until + 1]:
        alive.add(event) if event >= 0 else alive.discard(~event)
    found: dict[str, int] = {}
    for number in alive.difference(absent):
        block = tape.blocks[number]
        found[block.kind] = found.get(block.kind, 0) + block.size_bytes
    return found
