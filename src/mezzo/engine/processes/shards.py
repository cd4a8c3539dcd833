"""Tensors that several processes share (``DTensor``): this process's part, and the number of processes that have each element.

``fully_shard`` turns parameters and gradients into such tensors. They are recognised by their ``to_local`` method, so that
torch's distributed tensors are imported only if a script uses them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mezzo.devices import has_fp64
from mezzo.formats import FP32, FP64

_WHOLE = (Tensor, nn.Parameter)


def is_shared(tensor: Tensor) -> bool:
    """Return whether several processes share ``tensor``."""
    return type(tensor) not in _WHOLE and hasattr(tensor, "to_local")


def local(tensor: Any) -> Tensor:
    """Return this process's part of ``tensor``, in the same memory; a plain tensor itself."""
    if type(tensor) in _WHOLE or not is_shared(tensor):  # called for every tensor of every update
        return tensor  # type: ignore[no-any-return]
    with torch.no_grad():
        return tensor.to_local()  # type: ignore[no-any-return]


def shared_as(parameter: Any, part: Tensor) -> Tensor:
    """Return ``part``, this process's part of a tensor of the parameter's shape, as a tensor that is sharded like ``parameter``.

    It stays on its device, which may be the host.
    """
    if not is_shared(parameter):
        return part
    if part.device.type != parameter.device.type:  # from_local would move it to the device of the parameter's mesh
        whole = torch.empty_like(parameter.detach(), dtype=part.dtype, device=part.device)
        local(whole).copy_(part)
        return whole
    return type(parameter).from_local(  # type: ignore[no-any-return]
        part, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


def norm_of_all(gradients: Sequence[Any], norm_of: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """Return the norm of gradients over all processes that share them, the same in each.

    It takes one all-reduce of one number for each way in which gradients are sharded, among the processes that exchange the shards.

    Args:
        gradients: some, or all, sharded; plain ones count as they are in this process.
        norm_of: returns the norm of a list of plain tensors.
    """
    alike: dict[Any, list[Any]] = {}
    for gradient in gradients:
        alike.setdefault((gradient.device_mesh, gradient.placements) if is_shared(gradient) else None, []).append(
            gradient
        )
    squares = []
    for key, some in alike.items():
        here = [part for part in map(local, some) if part.numel()]
        wide = FP64.dtype if has_fp64(local(some[0]).device) else FP32.dtype
        square = norm_of(here).to(wide).square() if here else torch.zeros((), dtype=wide, device=local(some[0]).device)
        mesh: Any
        mesh, placements = (None, ()) if key is None else key
        for dim, place in enumerate(placements):
            if not place.is_replicate():
                dist.all_reduce(square, group=mesh.get_group(dim))
        squares.append(square)
    return torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt().float()


def parts(tensor: Any) -> int:
    """Return the number of processes over which one copy of ``tensor`` is spread; 1 for a plain tensor."""
    if not is_shared(tensor):
        return 1
    mesh = tensor.device_mesh
    return math.prod(mesh.size(i) for i, place in enumerate(tensor.placements) if not place.is_replicate())
