"""``apex.normalization``: the fused layers, implemented by torch's, whose kernels are fused, too.

The mixed ones return the format of their weights for any input; the others need input and weights in one format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NormalizedShape: TypeAlias = int | Sequence[int] | torch.Size


class _Fused(nn.Module):
    """Apex's constructor arguments, passed on to torch's class."""

    def __init__(
        self,
        normalized_shape: NormalizedShape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(_sizes(normalized_shape), eps=eps, elementwise_affine=elementwise_affine)
        self.memory_efficient = memory_efficient


class _Mixed(_Fused):
    """A norm that always has weights and returns their format."""

    weight: nn.Parameter

    def __init__(self, normalized_shape: NormalizedShape, eps: float = 1e-5, *, memory_efficient: bool = False) -> None:
        super().__init__(normalized_shape, eps=eps, memory_efficient=memory_efficient)

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input in the format of the weights."""
        normalised: Tensor = super().forward(input.to(self.weight.dtype))
        return normalised


class FusedLayerNorm(_Fused, nn.LayerNorm):
    """Layer normalisation over the last dimensions (Ba et al., arXiv:1607.06450).

    Args:
        normalized_shape: sizes of the last dimensions.
        eps: added to the variance.
        elementwise_affine: whether there are weight and bias.
        memory_efficient: without effect: torch keeps the input and two numbers per row for the backward pass.
    """


class MixedFusedLayerNorm(_Mixed, FusedLayerNorm):
    """Layer normalisation that returns the format of its weights; it always has weight and bias.

    Args:
        normalized_shape: sizes of the last dimensions.
        eps: added to the variance.
        memory_efficient: without effect.
    """


class FusedRMSNorm(_Fused, nn.RMSNorm):
    """RMS normalisation over the last dimensions (Zhang & Sennrich, arXiv:1910.07467).

    Args:
        normalized_shape: sizes of the last dimensions.
        eps: added to the mean square.
        elementwise_affine: whether there is a weight.
        memory_efficient: without effect.
    """


class MixedFusedRMSNorm(_Mixed, FusedRMSNorm):
    """RMS normalisation that returns the format of its weight, which it always has.

    Args:
        normalized_shape: sizes of the last dimensions.
        eps: added to the mean square.
        memory_efficient: without effect.
    """


def fused_layer_norm(
    input: Tensor, normalized_shape: NormalizedShape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return ``input`` normalised over its last dimensions, without weights."""
    return F.layer_norm(input, _sizes(normalized_shape), eps=eps)


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: NormalizedShape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Return ``input`` normalised over its last dimensions, times ``weight`` plus ``bias``."""
    return F.layer_norm(input, _sizes(normalized_shape), weight, bias, eps)


def fused_rms_norm(
    input: Tensor, normalized_shape: NormalizedShape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return ``input`` divided by its root mean square over the last dimensions."""
    return F.rms_norm(input, _sizes(normalized_shape), eps=eps)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: NormalizedShape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return ``input`` divided by its root mean square over the last dimensions, times ``weight``."""
    return F.rms_norm(input, _sizes(normalized_shape), weight, eps)


def _sizes(shape: NormalizedShape) -> list[int]:
    return [shape] if isinstance(shape, int) else list(shape)
