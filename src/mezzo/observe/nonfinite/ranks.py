"""Let the processes of a distributed run end at the same step: one that continues alone would wait for the others forever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def any_process(flag: bool, device_type: str) -> bool:
    """Return whether ``flag`` is true in any process; waits for all of them."""
    device = device_type if dist.get_backend() == "nccl" else "cpu"
    largest = torch.tensor(float(flag), device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return bool(largest)


def first_of_all(value: Any, *, arrived: bool) -> tuple[int, Any]:
    """Return where a fault began: the rank of that process and its fault; (-1, None) if no process has one.

    Args:
        value: the fault that this process found; None if it found none.
        arrived: whether the fault may have come from another process. Such a fault counts only if no process has one of its own: which
            process receives the gradients of all first depends on how fast they are.
    """
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, (arrived, value))
    return where_it_began(values)


def where_it_began(values: Sequence[tuple[bool, Any]]) -> tuple[int, Any]:
    """Return the first rank whose value did not arrive from elsewhere, else the first with any value; and that value."""
    found = [(arrived, rank) for rank, (arrived, value) in enumerate(values) if value is not None]
    if not found:
        return -1, None
    _, rank = min(found)
    return rank, values[rank][1]
