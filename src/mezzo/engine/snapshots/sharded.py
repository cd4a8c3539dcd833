"""Sharded tensors in snapshots: each process saves its shard and the shard's position in the whole tensor.

The same number of processes loads the shards as they are. Any other number assembles the whole tensors from all files and shards them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mezzo.engine.gradients import trained_by
from mezzo.engine.processes.shards import is_shared, local, shared_as
from mezzo.errors import SnapshotError


class Shard(NamedTuple):
    """A part of a tensor."""

    part: Tensor
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    at: tuple[int, ...]
    """The part's first index in the whole tensor."""


def shard_of(tensor: Any) -> Shard:
    """Return this process's part of a sharded tensor."""
    return Shard(local(tensor).detach(), tuple(tensor.shape), _begin(tensor))


def placed(value: Any, like: Any) -> Any:
    """Return a saved shard or whole tensor, sharded like ``like``; a value of another shape as it is.

    Raises:
        SnapshotError: the shard belongs to another division of the tensor among processes.
    """
    if isinstance(value, Shard):
        here = local(like) if isinstance(like, Tensor) and is_shared(like) else None
        if here is None or value.part.shape != here.shape or value.at != _begin(like):
            raise SnapshotError(
                "its shards are divided among processes in another way than this session's",
                hint="load the folder that contains the files of all processes",
            )
        return shared_as(like, value.part.to(here.device))
    if isinstance(value, Tensor) and isinstance(like, Tensor) and is_shared(like) and not is_shared(value):
        if value.shape != like.shape:
            return value
        own = tuple(slice(n, n + size) for n, size in zip(_begin(like), local(like).shape, strict=True))
        return shared_as(like, value[own].to(local(like).device).clone())
    return value


def placed_model(saved: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return a model's saved state, each tensor sharded like the model's own."""
    own = model.state_dict()
    return {name: placed(value, own.get(name)) for name, value in saved.items()}


def placed_optimizer(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's saved state, each tensor sharded like its parameter."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    by_number = dict(zip(numbers, trained_by([optimizer]), strict=False))
    state = {
        number: {name: placed(value, by_number.get(number)) for name, value in values.items()}
        for number, values in saved["state"].items()
    }
    return {**saved, "state": state}


def whole(parts: Sequence[Any]) -> Any:
    """Return one state from those of all processes, with whole tensors instead of shards; other values are the first process's."""
    first = parts[0]
    if isinstance(first, Shard):
        full = torch.empty(first.shape, dtype=first.part.dtype)
        for shard in parts:
            full[tuple(slice(n, n + size) for n, size in zip(shard.at, shard.part.shape, strict=True))] = shard.part
        return full
    if isinstance(first, dict):
        return type(first)((key, whole([part[key] for part in parts])) for key in first)
    if isinstance(first, (list, tuple)):
        return type(first)(whole(items) for items in zip(*parts, strict=True))
    return first


def _begin(tensor: Any) -> tuple[int, ...]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, begin = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(begin)
