"""Memory layout of tensors: compiled kernels walk through addresses, not indices."""

from __future__ import annotations

import torch
from torch import Tensor

from mezzo.errors import SessionError


def has_gaps(tensor: Tensor) -> bool:
    """Return whether a tensor's elements do not fill one contiguous stretch of memory without overlap."""
    return not (tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor))


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient that fills one stretch of memory: itself if it does.

    Raises:
        SessionError: the gradient is sparse.
    """
    if gradient.layout is not torch.strided:
        raise SessionError(
            f"a gradient of shape {tuple(gradient.shape)} is {gradient.layout}; allowed: dense gradients",
            hint="build the embedding with sparse=False, or use torch.optim.SparseAdam for it",
        )
    if gradient.is_contiguous():  # called for every gradient of every update
        return gradient
    return gradient.contiguous() if has_gaps(gradient) else gradient


def laid_out_as(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return ``tensor`` with the strides of ``parameter``, which has no gaps: itself if it has them."""
    if tensor.stride() == parameter.stride():
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)


def gradient_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient with the strides of ``parameter``, which has no gaps: itself if it has them.

    Raises:
        SessionError: the gradient is sparse.
    """
    if gradient.layout is torch.strided and gradient.stride() == parameter.stride():
        return gradient
    return laid_out_as(parameter, dense(gradient))


def refuse_gaps(parameter: Tensor) -> None:
    """Refuse a weight whose elements do not fill one stretch of memory."""
    if has_gaps(parameter):
        raise SessionError(
            f"a parameter of shape {tuple(parameter.shape)} has strides {parameter.stride()}; "
            "allowed: weights that fill one stretch of memory",
            hint="give it memory of its own: parameter.data = parameter.data.contiguous()",
        )
