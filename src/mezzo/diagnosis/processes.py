"""Let the processes of a distributed run end at the same step: one that goes on alone waits for the others for ever."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def several() -> bool:
    """Return whether this process is one of several that train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def any_process(flag: bool, device_type: str) -> bool:
    """Return whether ``flag`` is true in any process; waits for all of them."""
    on = device_type if dist.get_backend() == "nccl" else "cpu"
    found = torch.tensor(float(flag), device=on)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found)


def first_of_all(value: Any) -> tuple[int, Any]:
    """Return the first value that is not None, with the rank of its process; (-1, None) where all are."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return next(((rank, v) for rank, v in enumerate(values) if v is not None), (-1, None))
