"""Shards in snapshots: parts that are put together again, and tensors that are shared as others are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mezzo.engine.snapshots.structure import Shard, placed, put_together, shard_of, take_apart, whole
from mezzo.errors import SnapshotError

WHOLE = torch.arange(15.0).reshape(5, 3)


@pytest.fixture
def shared() -> Iterator[Any]:
    """Return a tensor that all processes of a group share, this one of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard as ByRows
        from torch.distributed.tensor import distribute_tensor

        yield distribute_tensor(WHOLE, init_device_mesh("cpu", (1,)), [ByRows(0)])
    finally:
        dist.destroy_process_group()


def test_parts_of_all_processes_make_the_whole() -> None:
    parts = [
        {"w": Shard(WHOLE[:2], (5, 3), (0, 0)), "step": [1, (2.0, None)]},
        {"w": Shard(WHOLE[2:4], (5, 3), (2, 0)), "step": [1, (2.0, None)]},
        {"w": Shard(WHOLE[4:], (5, 3), (4, 0)), "step": [1, (2.0, None)]},
        {"w": Shard(WHOLE[:0], (5, 3), (0, 0)), "step": [1, (2.0, None)]},  # more processes than rows
    ]
    found = whole(parts)
    assert torch.equal(found["w"], WHOLE)
    assert found["step"] == [1, (2.0, None)]


def test_a_shard_is_saved_with_its_place() -> None:
    tree, tensors = take_apart({"w": Shard(WHOLE[2:4], (5, 3), (2, 0))})
    found = put_together(tree, tensors)["w"]
    assert (found.shape, found.at, found.part.tolist()) == ((5, 3), (2, 0), WHOLE[2:4].tolist())


def test_a_shared_tensor_is_saved_as_a_shard_and_loaded_as_one(shared: Any) -> None:
    tree, tensors = take_apart({"w": shared})
    for saved in (put_together(tree, tensors)["w"], WHOLE):  # of as many processes, and of another number
        found = placed(saved, shared)
        assert found.placements == shared.placements
        assert torch.equal(found.full_tensor(), WHOLE)
    assert placed(torch.ones(()), shared).shape == ()  # a step count is no part of anything


def test_a_shard_of_another_division_is_refused(shared: Any) -> None:
    assert shard_of(shared).at == (0, 0)
    for saved, like in ((Shard(WHOLE[:2], (5, 3), (0, 0)), shared), (Shard(WHOLE, (5, 3), (0, 0)), WHOLE)):
        with pytest.raises(SnapshotError, match="divided among processes in another way"):
            placed(saved, like)
