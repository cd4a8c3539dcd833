"""Memory of a tape on one GPU: the bytes of its tensors, the bytes that the allocator reserves, and whether they fit."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from mezzo.measure.predict.memory.allocator import MIB, Block, CachingAllocator, SimulatedOutOfMemory
from mezzo.measure.predict.tape import TrainingTape

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
    live: dict[int, Block] = {}
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
