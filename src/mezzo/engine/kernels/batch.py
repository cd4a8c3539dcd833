"""The tensors and settings of one kernel call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mezzo.formats import FP32


@dataclass(kw_only=True)
class Batch:
    """The tensors of one parameter group on one device: one entry in each list per parameter that has a gradient.

    A weight's master is the weight itself (FP32 weights, and 16-bit ones without a master), an FP32 tensor of its shape, or an
    int16 one: the low 16 bits of a split master, whose upper 16 bits are the BF16 weight.
    """

    weights: list[Tensor]
    gradients: list[Tensor]
    masters: list[Tensor]
    steps: list[Tensor]
    """Number of updates of each parameter so far: FP32, no dimensions."""
    moments: dict[str, list[Tensor]] = field(default_factory=dict)
    """By torch's name (``exp_avg``): FP32 or BF16 tensors of the weights' shapes, or 8-bit ones packed by ``eight_bit``."""
    numbers: list[int] = field(default_factory=list)
    """Each parameter's number in its optimizer, which selects its random bits (``noise``)."""
    stochastic: bool = False
    """Whether BF16 weights without a master are rounded stochastically."""
    remembered: dict[Any, Any] = field(default_factory=dict)
    """Data that a device's kernels keep from one update of the group to the next."""

    @property
    def random(self) -> bool:
        """Whether anything is rounded stochastically."""
        kept = [tensors[0].dtype for tensors in self.moments.values() if tensors]
        return self.stochastic or any(dtype is not FP32.dtype for dtype in kept)


@dataclass(frozen=True, kw_only=True)
class AdamWSettings:
    """A group's settings for one update, with the names of ``torch.optim.AdamW``."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    amsgrad: bool
    maximize: bool
    now: Callable[[], AdamWSettings] | None = field(default=None, compare=False, repr=False)
    """Return the group's current settings: a captured step calls it before each replay."""


@dataclass(frozen=True, kw_only=True)
class SGDSettings:
    """A group's settings for one update, with the names of ``torch.optim.SGD``."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool
    now: Callable[[], SGDSettings] | None = field(default=None, compare=False, repr=False)
    """As in ``AdamWSettings``."""
