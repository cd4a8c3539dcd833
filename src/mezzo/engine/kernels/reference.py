"""The specification of the kernels: what they are given, and an update in plain PyTorch.

``factor`` unscales, averages and clips gradients in one multiplication. If ``found_inf`` is
above 0, nothing changes, not even the step counts; no line waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from mezzo.engine.kernels.storage import (
    SECOND_STREAM,
    UNSIGNED,
    flat,
    flat_fp32,
    join,
    laid_out_as,
    round_to_bf16,
    rounded,
    split,
    streams,
    values_in,
)
from mezzo.formats import BF16, FP32


class Spread(NamedTuple):
    """How processes share one parameter, for a formula that needs all of it: both do nothing where each has the whole."""

    whole: Callable[[Tensor], Tensor]
    """Gathers a tensor from the parts that all processes have of it; each must call it."""
    part: Callable[[Tensor], Tensor]
    """Cuts this process's part out of a whole tensor."""


NOT_SPREAD = Spread(lambda part: part, lambda whole: whole)


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
    spread: list[Spread] = field(default_factory=list)
    """How processes share each parameter, if the rule needs whole matrices."""

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


class Values(NamedTuple):
    """What a formula reads of one parameter, in FP32: flat in the order of memory, or in the weight's shape."""

    weight: Tensor
    gradient: Tensor
    """Unscaled, averaged and clipped; of opposite sign if the optimizer ascends."""
    moments: dict[str, Tensor]
    step: Tensor
    """The number of this update, from 1: no dimensions."""
    spread: Spread = NOT_SPREAD
    """The tensors above are this process's parts, but for moments of the rule's own shapes, which are whole in each."""


Formula: TypeAlias = Callable[[Values, Any], "tuple[Tensor, dict[str, Tensor]]"]
"""Returns the new weight and the new moments by name; the second argument is the group's settings."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """An optimizer's update of one parameter: its formula, and the kernels that compute the same faster."""

    formula: Formula
    kernel: str = ""
    """The name of the function of ``cpu``, ``fused`` and ``gpu``; empty if there is none."""
    whole_matrices: bool = False
    """Whether the formula needs the weight in its shape, not as a row of numbers, and gathers by ``spread`` what is spread."""
    moment_shape: Callable[[str, torch.Size], torch.Size] | None = None
    """The shape of a moment, by its name and the whole weight's shape; such moments are given as rows. None for the weight's own."""


def apply(rule: Rule, batch: Batch, settings: Any, factor: Tensor, found_inf: Tensor) -> None:
    """Update each parameter of ``batch`` by the rule's formula."""
    signed_factor = -factor if settings.maximize else factor
    for i, weight in enumerate(batch.weights):
        values = Values(
            weight=_fp32_master(weight, batch.masters[i]),
            gradient=flat(batch.gradients[i]).float() * signed_factor,
            moments={name: _moment(batch, name, i) for name in batch.moments},
            step=batch.steps[i] + 1,
        )
        if rule.whole_matrices:
            own_shapes = rule.moment_shape is not None
            shaped = _in_shape_of(weight, values, moments_too=not own_shapes)._replace(spread=batch.spread[i])
            with _own_formats(weight.device.type):
                updated, moments = rule.formula(shaped, settings)
            updated = flat(laid_out_as(weight, updated))
            moments = {n: m.reshape(-1) if own_shapes else flat(laid_out_as(weight, m)) for n, m in moments.items()}
        else:
            updated, moments = rule.formula(values, settings)
        _write_back(batch, i, updated, values.step, moments, found_inf)


def _own_formats(device_type: str) -> AbstractContextManager[Any]:
    """Return a context without autocast, which would cast a formula's products and norms if a step runs inside a region."""
    available = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if available else nullcontext()


def _in_shape_of(weight: Tensor, values: Values, *, moments_too: bool) -> Values:
    def shaped(row: Tensor) -> Tensor:
        return row.as_strided(weight.shape, weight.stride())

    moments = {name: shaped(moment) if moments_too else moment for name, moment in values.moments.items()}
    return Values(shaped(values.weight), shaped(values.gradient), moments, values.step)


def sum_of_squares(gradients: list[Tensor]) -> Tensor:
    """Return the sum of all squares in FP64: not finite exactly when a gradient is not."""
    squares = [g.double().square().sum() for g in gradients]
    return torch.stack([s.to(squares[0].device) for s in squares]).sum()


def _fp32_master(weight: Tensor, master: Tensor) -> Tensor:
    return join(flat(weight), flat(master)) if master.dtype is torch.int16 else flat(master).float()


def _moment(batch: Batch, name: str, i: int) -> Tensor:
    kept = batch.moments[name][i]
    return flat_fp32(kept, values_in(kept), signed=name not in UNSIGNED)


def _write_back(batch: Batch, i: int, updated: Tensor, step: Tensor, new: dict[str, Tensor], found_inf: Tensor) -> None:
    skips = found_inf > 0

    def put(into: Tensor, value: Tensor) -> None:
        torch.where(skips, into, value.to(into.dtype), out=into)

    weight, master = batch.weights[i], batch.masters[i]
    count = max(weight.numel(), *(value.numel() for value in new.values()), 0)
    noise = streams(count, batch.numbers[i], step) if batch.random else (step, step, step)
    if master.dtype is torch.int16:
        high, low = split(updated)
        put(flat(weight), high)
        put(flat(master), low)
    elif weight is not master:
        put(flat(master), updated)
        put(flat(weight), updated)
    else:
        random = batch.stochastic and weight.dtype is BF16.dtype
        put(flat(weight), round_to_bf16(updated, noise[0][: weight.numel()]) if random else updated)
    put(batch.steps[i], step)
    for name, value in new.items():
        kept, bits = batch.moments[name][i], noise[2 if name in SECOND_STREAM else 1]
        own = bits[: value.numel()] if batch.random else bits
        put(flat(kept), rounded(value, kept.dtype, own, signed=name not in UNSIGNED))
