"""Sizes at other batches: straight lines, and blocks that grow faster than the batch."""

from __future__ import annotations

import pytest

from mezzo.errors import UsageError
from mezzo.measure.predict.tape import MemoryBlock, TrainingTape, check_same_steps, grow_unevenly


def tape(batch: int, size_bytes: int) -> TrainingTape:
    return TrainingTape(batch=batch, blocks=[MemoryBlock(size_bytes, "activations")])


@pytest.mark.parametrize(
    ("small", "large", "uneven", "at_16"),
    [
        (400, 800, False, 1600),  # 100 bytes a sample
        (500, 900, False, 1700),  # and 100 beside
        (300, 700, False, 1500),  # all samples but one, as differences of neighbours
        (200, 600, False, 1400),  # all but two
        (100, 500, True, 2200),  # not all but three: 9.375 * n**2 - 12.5 * n
        (160, 640, True, 2560),  # 10 * n**2
        (700, 700, False, 700),
        (0, 400, False, 1200),
    ],
)
def test_a_size_at_another_batch(small: int, large: int, uneven: bool, at_16: int) -> None:
    one, other = tape(4, small), tape(8, large)
    assert grow_unevenly(one, other) is uneven
    assert one.at_batch(other, 16).blocks[0].size_bytes == at_16


def test_steps_are_the_same_in_whatever_order_they_free_at_once() -> None:
    def step(batch: int, *events: int) -> TrainingTape:
        return TrainingTape(batch=batch, blocks=[MemoryBlock(8, "temporaries") for _ in range(3)], events=[*events])

    check_same_steps(step(4, 0, 1, ~0, ~1, 2, ~2), step(8, 0, 1, ~1, ~0, 2, ~2))
    with pytest.raises(UsageError, match="run different operations"):
        check_same_steps(step(4, 0, 1, ~0, ~1, 2, ~2), step(8, 0, 1, ~1, 2, ~0, ~2))
