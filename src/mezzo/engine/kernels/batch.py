"""What one kernel call works on, and with which settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(kw_only=True)
class Batch:
    """Hold the tensors of one parameter group on one device, entry by entry for each parameter that has a gradient.

    A weight's master is the weight itself (FP32 weights, and 16-bit ones without a master), an FP32 tensor of its shape, or an
    int16 one: the low 16 bits of a split master, whose upper 16 bits are the BF16 weight.
    """

    weights: list[Tensor]
    gradients: list[Tensor]
    masters: list[Tensor]
    steps: list[Tensor]
    """Updates of each parameter so far: FP32, no dimensions."""
    moments: dict[str, list[Tensor]] = field(default_factory=dict)
    """By torch's name (``exp_avg``): FP32 tensors of the weights' shapes."""


@dataclass(frozen=True, kw_only=True)
class AdamWSettings:
    """Hold a group's settings for one update, as ``torch.optim.AdamW`` names them."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    amsgrad: bool
    maximize: bool


@dataclass(frozen=True, kw_only=True)
class SGDSettings:
    """Hold a group's settings for one update, as ``torch.optim.SGD`` names them."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool
