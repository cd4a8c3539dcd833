"""What differs between ranks, as a table."""

from __future__ import annotations

from typing import Any

import pytest

from mezzo.launch.ranks.merged import differences
from mezzo.records import RankRun


def ranks(**columns: list[Any]) -> list[RankRun]:
    """Return ranks that are alike but for these fields."""
    count = len(next(iter(columns.values())))
    same: dict[str, Any] = {"device": "cpu", "num_steps": 20, "weights": "a", "cpu_ms": 10.0, "total_bytes": 1000}
    rows = [{name: values[rank] for name, values in columns.items()} for rank in range(count)]
    return [RankRun(rank=rank, **{**same, **row}) for rank, row in enumerate(rows)]


CASES = [
    (ranks(num_steps=[20, 20]), []),
    (ranks(weights=["a", "b", "b"]), [("weights", "a on rank 0; b on ranks 1, 2")]),
    (ranks(weights=["a", ""]), []),  # one had lost its model by then
    (ranks(num_steps=[20, 19]), [("steps", "19 on rank 1, 20 on rank 0")]),
    (ranks(skipped_steps=[[1, 3], [1, 3]]), []),
    (ranks(skipped_steps=[[1, 3], [3]]), [("skipped", "step 1, by rank 0 only")]),
    (ranks(final_scale=[1024.0, 1024.0, 512.0]), [("loss scale", "1024 on ranks 0, 1; 512 on rank 2")]),
    (ranks(cpu_ms=[10.0, 14.9]), []),
    (ranks(cpu_ms=[10.0, 20.0]), [("time a step", "rank 1 computes 2.0 times as long as rank 0")]),
    (ranks(cpu_ms=[10.0, 20.0], device=["NVIDIA H100", "NVIDIA H100"]), []),  # the host of a GPU waits busily
    (ranks(cpu_ms=[10.0, 20.0], num_steps=[5, 5]), []),
    (ranks(total_bytes=[1000, 1500]), [("memory", "rank 1 has 1.50 times the bytes of rank 0")]),
    (ranks(cuda_allocated_bytes=[1000, 1100]), []),
]


@pytest.mark.parametrize(("given", "found"), CASES)
def test_differences(given: list[RankRun], found: list[tuple[str, str]]) -> None:
    assert [(one.what, one.value) for one in differences(given)] == found
