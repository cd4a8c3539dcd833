"""The memory of tensors: of plain ones, views, and those that have none of their own."""

from __future__ import annotations

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from mezzo.observe.lint.by_hand import GradientView
from mezzo.observe.tensors import storage, storage_of


def test_a_view_has_the_memory_of_what_it_is_a_view_of() -> None:
    whole = torch.ones(4)
    assert storage_of(whole) == storage_of(whole[2:]) == whole.data_ptr()


def test_sparse_tensors_and_wrappers_have_none() -> None:
    """``full_tensor()`` of a shard is such a wrapper until it has arrived."""
    for tensor in (torch.eye(2).to_sparse(), AsyncCollectiveTensor(torch.ones(2))):
        assert storage(tensor) is None
        assert storage_of(tensor) == id(tensor)


def test_a_view_of_gradients_is_shown_wrappers() -> None:
    seen: list[bool] = []
    view = GradientView([torch.ones(2)], norm_read=lambda: seen.append(True), limited=seen.append)
    arriving = AsyncCollectiveTensor(torch.ones(2))
    view.inspect_call("contiguous", [arriving], arriving)
    assert seen == []
