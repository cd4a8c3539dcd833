"""``nn.SyncBatchNorm`` on a CPU: torch has it only for GPUs.

The statistics are those of the batches of all processes, summed over gloo; the backward pass sums their gradients in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def normalize_over_processes(original: Callable[..., Tensor], layer: nn.SyncBatchNorm, input: Tensor) -> Tensor:
    """Return what ``SyncBatchNorm.forward`` returns on GPUs; with one process, that is a batch norm."""
    if not (layer.training and dist.is_initialized()):
        return original(layer, input)
    group = layer.process_group or dist.group.WORLD
    if dist.get_world_size(group) == 1:
        return nn.modules.batchnorm._BatchNorm.forward(layer, input)
    layer._check_input_dim(input)
    layer._check_non_zero_input_channels(input)
    values = input.float()
    shape = [1, -1, *[1] * (input.dim() - 2)]
    dims = [dim for dim in range(input.dim()) if dim != 1]
    count = torch.tensor([input.numel() / input.size(1)])
    dist.all_reduce(count, group=group)
    mean = _summed(values.sum(dims), group) / count
    centred = values - mean.view(shape)
    variance = _summed(centred.square().sum(dims), group) / count
    _track(layer, mean.detach(), variance.detach(), float(count))
    normal = centred * (variance + layer.eps).rsqrt().view(shape)
    if layer.weight is not None:
        normal = normal * layer.weight.view(shape)
    if layer.bias is not None:
        normal = normal + layer.bias.view(shape)
    return normal.to(input.dtype)


class _Sum(torch.autograd.Function):
    """The sum of a tensor over processes, and of its gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _summed(value: Tensor, group: Any) -> Tensor:
    total: Tensor = _Sum.apply(value, group)
    return total


def _track(layer: nn.SyncBatchNorm, mean: Tensor, variance: Tensor, count: float) -> None:
    """Move the running statistics towards those of a batch, whose variance is made unbiased."""
    if layer.running_mean is None or layer.running_var is None or layer.num_batches_tracked is None:
        return
    layer.num_batches_tracked.add_(1)
    share = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), share)
    layer.running_var.lerp_((variance * (count / max(count - 1, 1))).to(layer.running_var.dtype), share)
