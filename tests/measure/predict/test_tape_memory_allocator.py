"""The rules of torch's caching allocator, each with the bytes that follow from it."""

from __future__ import annotations

import pytest

from mezzo.measure.predict.tape_memory import MIB, CachingAllocator, SimulatedOutOfMemory, rounded_bytes, segment_bytes


@pytest.mark.parametrize(
    ("size", "rounded", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
    ],
)
def test_sizes_of_blocks_and_of_new_segments(size: int, rounded: int, segment: int) -> None:
    assert rounded_bytes(size) == rounded
    allocator = CachingAllocator()
    allocator.allocate(size)
    assert segment_bytes(rounded) == segment
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (rounded, segment)


def test_a_rest_that_is_not_cut_off_counts_as_allocated() -> None:
    allocator = CachingAllocator()
    allocator.allocate(33 * MIB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (34 * MIB, 34 * MIB)


def _reserved(*events: int) -> int:
    """Replay sizes in bytes, ``-n`` releases the n-th block (from 1), and return what stays reserved."""
    allocator, blocks = CachingAllocator(), []
    for event in events:
        if event > 0:
            blocks.append(allocator.allocate(event))
        else:
            allocator.release(blocks[-event - 1])
    return allocator.reserved_bytes


@pytest.mark.parametrize(
    ("events", "reserved"),
    [
        ((MIB, MIB), 2 * MIB),  # two small blocks fill a segment
        ((MIB, MIB, 512), 4 * MIB),  # the third needs another
        ((MIB, 2 * MIB), 22 * MIB),  # small and large pools are apart
        ((9 * MIB, 9 * MIB), 20 * MIB),
        ((9 * MIB, 9 * MIB, 3 * MIB), 40 * MIB),
        ((19 * MIB, 1 - 2, 11 * MIB), 20 * MIB),  # a freed segment of its own is cut: 9 MiB stay free
        ((12 * MIB, -1, 11 * MIB, MIB + 512), 12 * MIB + 20 * MIB),  # a rest of 1 MiB is not cut off
        ((12 * MIB, -1, 11 * MIB - 512, MIB + 512), 12 * MIB),  # one of more is, and is used
        ((30 * MIB, -1, 31 * MIB), 30 * MIB + 32 * MIB),  # a free block that is too small is of no use
        ((9 * MIB, 9 * MIB, -1, -2, 18 * MIB), 20 * MIB),  # neighbours merge
        ((9 * MIB, 9 * MIB, -2, -1, 18 * MIB), 20 * MIB),
        ((40 * MIB, 12 * MIB, -1, -2, 11 * MIB, 40 * MIB), 52 * MIB),  # best fit: 12 MiB is taken, not 40 MiB
    ],
)
def test_reserved_bytes_after_a_replay(events: tuple[int, ...], reserved: int) -> None:
    assert _reserved(*events) == reserved


def test_free_segments_go_back_before_the_device_is_full() -> None:
    allocator = CachingAllocator(limit_bytes=64 * MIB)
    first, second = allocator.allocate(30 * MIB), allocator.allocate(30 * MIB)
    allocator.release(first)
    allocator.release(second)
    allocator.allocate(40 * MIB)
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (40 * MIB, 60 * MIB)


def test_a_segment_with_a_block_in_use_does_not_go_back() -> None:
    allocator = CachingAllocator(limit_bytes=64 * MIB)
    held = allocator.allocate(2 * MIB)
    allocator.release(allocator.allocate(30 * MIB))
    with pytest.raises(SimulatedOutOfMemory):
        allocator.allocate(50 * MIB)
    assert (allocator.reserved_bytes, held.free) == (20 * MIB, False)


def test_peaks_are_of_allocated_and_of_reserved_bytes() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(600 << 10) for _ in range(4)]  # three fit into a segment of 2 MiB
    for block in blocks:
        allocator.release(block)
    assert (allocator.allocated_bytes, allocator.peak_allocated_bytes) == (0, 4 * (600 << 10))
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (4 * MIB, 4 * MIB)


# --- against a log of torch's own format -----------------------------------------------------------------------------------

TRACE = [
    # ``device_traces`` of a memory snapshot, written by hand from the allocator's rules: requests of tensors, and the segments that
    # the device gave for them. Freed blocks are named by their address.
    {"action": "segment_alloc", "addr": 0, "size": 20 * MIB},
    {"action": "alloc", "addr": 0, "size": 6 * MIB},
    {"action": "alloc", "addr": 6 * MIB, "size": 8 * MIB},
    {"action": "segment_alloc", "addr": 100 * MIB, "size": 2 * MIB},
    {"action": "alloc", "addr": 100 * MIB, "size": 4096},
    {"action": "free_completed", "addr": 0, "size": 6 * MIB},
    {"action": "segment_alloc", "addr": 200 * MIB, "size": 20 * MIB},
    {"action": "alloc", "addr": 200 * MIB, "size": 9 * MIB},
    {"action": "alloc", "addr": 0, "size": 5 * MIB},
    {"action": "free_completed", "addr": 200 * MIB, "size": 9 * MIB},
    {"action": "segment_alloc", "addr": 300 * MIB, "size": 34 * MIB},
    {"action": "alloc", "addr": 300 * MIB, "size": 33 * MIB + 512},
    {"action": "segment_free", "addr": 200 * MIB, "size": 20 * MIB},
    {"action": "alloc", "addr": 14 * MIB, "size": 6 * MIB},
]


def test_the_peak_of_a_log_is_simulated_from_its_requests_alone() -> None:
    reserved, peak, live = 0, 0, {}
    allocator = CachingAllocator()
    for event in TRACE:
        action, size = event["action"], event["size"]
        assert isinstance(size, int)
        if action == "alloc":
            live[event["addr"]] = allocator.allocate(size)
        elif action == "free_completed":
            allocator.release(live.pop(event["addr"]))
        else:
            reserved += size if action == "segment_alloc" else -size
            peak = max(peak, reserved)
    assert peak == 76 * MIB
    assert allocator.peak_reserved_bytes == pytest.approx(peak, rel=0.03)
