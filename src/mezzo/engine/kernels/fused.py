"""torch's own fused kernels with the same interface, for machines that cannot compile ours.

``grad_scale`` includes the clip and unscale factor, so these need no separate pass. Two passes more than ours:
16-bit gradients are first widened into FP32 copies (4 bytes per parameter while the update runs), and 16-bit weights
are rounded from their masters afterwards. Moments of fewer bits are also widened, and rounded back afterwards.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from mezzo.devices import has_fp64
from mezzo.engine.kernels.reference import AdamWSettings, Batch, SGDSettings
from mezzo.engine.kernels.storage import UNSIGNED, dense, flat, flat_fp32, join, round_to_bf16, rounded, split, streams
from mezzo.formats import BF16, FP16, FP32, FP64


def sum_of_squares(gradients: list[Tensor]) -> Tensor:
    """Return the sum of all squares in FP64, or FP32 if the device has no FP64: not finite exactly when a gradient is not."""
    gradients = [dense(g) for g in gradients]
    if not all(has_fp64(g.device) for g in gradients):
        return _narrow_sum_of_squares(gradients)
    # Norms of FP16 gradients cannot leave FP32's range; norms of other formats can.
    wide = FP32.dtype if all(g.dtype is FP16.dtype for g in gradients) else FP64.dtype
    norms = torch._foreach_norm(gradients, dtype=wide)
    return torch.stack([n.to(norms[0].device, FP64.dtype) for n in norms]).square().sum()


def _narrow_sum_of_squares(gradients: list[Tensor]) -> Tensor:
    """Return the sum in FP32, computed in units of the largest element, so that no square overflows or vanishes; at most FP32's maximum.

    It copies one gradient at a time: 4 bytes per element.
    """
    peak = torch.stack(
        [n.to(gradients[0].device) for n in torch._foreach_norm(gradients, math.inf, dtype=FP32.dtype)]
    ).amax()
    unit = torch.where(peak.isfinite() & (peak > 0), peak, torch.ones_like(peak))
    norms = [torch.linalg.vector_norm(g.float() / unit.to(g.device)).to(peak.device) for g in gradients]
    total = (torch.stack(norms).square().sum().sqrt() * unit).square()
    return torch.where(peak.isfinite(), total.clamp(max=FP32.max), peak.square())


def adamw(batch: Batch, settings: AdamWSettings, factor: Tensor, found_inf: Tensor) -> None:
    """Update like ``torch.optim.AdamW(fused=True)``."""
    s, masters, moments = settings, _fp32_masters(batch), _moments(batch)
    torch._foreach_add_(batch.steps, 1)
    torch._fused_adamw_(
        masters,
        _wide(batch.gradients),
        moments["exp_avg"],
        moments["exp_avg_sq"],
        moments.get("max_exp_avg_sq", []),
        batch.steps,
        amsgrad=s.amsgrad,
        lr=s.lr,
        beta1=s.beta1,
        beta2=s.beta2,
        weight_decay=s.weight_decay,
        eps=s.eps,
        maximize=s.maximize,
        grad_scale=factor.reciprocal(),
        found_inf=found_inf,
    )
    torch._foreach_sub_(batch.steps, [found_inf] * len(batch.steps))
    _write_back(batch, masters, moments)


def sgd(batch: Batch, settings: SGDSettings, factor: Tensor, found_inf: Tensor) -> None:
    """Update like ``torch.optim.SGD(fused=True)``; with dampening the host reads the step counts."""
    if not (settings.momentum and settings.dampening):
        # A first buffer is the gradient itself; without dampening, so is the update of a buffer of zeros.
        _sgd(batch, settings, factor, found_inf, first=False)
        return
    # torch has one flag for all parameters: whether this is the first update.
    has_buffer = [bool(step > 0) for step in batch.steps]
    for first in (True, False):
        part = _chosen(batch, [first is not known for known in has_buffer])
        if part.weights:
            _sgd(part, settings, factor, found_inf, first=first)


def _sgd(batch: Batch, settings: SGDSettings, factor: Tensor, found_inf: Tensor, *, first: bool) -> None:
    s, masters, moments = settings, _fp32_masters(batch), _moments(batch)
    torch._fused_sgd_(
        masters,
        _wide(batch.gradients),
        moments.get("momentum_buffer", []),
        weight_decay=s.weight_decay,
        momentum=s.momentum,
        lr=s.lr,
        dampening=s.dampening,
        nesterov=s.nesterov,
        maximize=s.maximize,
        is_first_step=first,
        grad_scale=factor.reciprocal(),
        found_inf=found_inf,
    )
    torch._foreach_add_(batch.steps, [1 - found_inf] * len(batch.steps))
    _write_back(batch, masters, moments)


def _chosen(batch: Batch, flags: list[bool]) -> Batch:
    """Return the entries of ``batch`` whose flag is set."""

    def pick(tensors: list[Tensor]) -> list[Tensor]:
        return list(itertools.compress(tensors, flags))

    return Batch(
        weights=pick(batch.weights),
        gradients=pick(batch.gradients),
        masters=pick(batch.masters),
        steps=pick(batch.steps),
        moments={name: pick(tensors) for name, tensors in batch.moments.items()},
        numbers=list(itertools.compress(batch.numbers, flags)),
        stochastic=batch.stochastic,
    )


def _wide(gradients: list[Tensor]) -> list[Tensor]:
    # The kernel unscales in place, so FP32 gradients are copied as well.
    return [flat(g).float().clone() if g.element_size() == 4 else flat(g).float() for g in gradients]


def _fp32_masters(batch: Batch) -> list[Tensor]:
    pairs = [(flat(w), flat(m)) for w, m in zip(batch.weights, batch.masters, strict=True)]
    return [join(w, m) if m.dtype is torch.int16 else m.float() for w, m in pairs]


def _moments(batch: Batch) -> dict[str, list[Tensor]]:
    sizes = [w.numel() for w in batch.weights]
    return {
        name: [flat_fp32(kept, size, signed=name not in UNSIGNED) for kept, size in zip(tensors, sizes, strict=True)]
        for name, tensors in batch.moments.items()
    }


def _write_back(batch: Batch, masters: list[Tensor], moments: dict[str, list[Tensor]]) -> None:
    # A skipped update needs no special case: unchanged values are rounded to the same values, whatever the noise.
    for i, (weight, kept, updated) in enumerate(zip(batch.weights, batch.masters, masters, strict=True)):
        step = batch.steps[i]
        noise = streams(weight.numel(), batch.numbers[i], step) if batch.random else (step, step, step)
        if kept.dtype is torch.int16:
            high, low = split(updated)
            flat(weight).copy_(high)
            flat(kept).copy_(low)
        elif batch.stochastic and weight.dtype is BF16.dtype:
            flat(weight).copy_(round_to_bf16(updated, noise[0]))
        elif weight.dtype is not FP32.dtype:
            flat(weight).copy_(updated)
        for name, tensors in batch.moments.items():
            signed, to = name not in UNSIGNED, tensors[i]
            if to.dtype is not FP32.dtype:
                flat(to).copy_(rounded(moments[name][i], to.dtype, noise[1 if signed else 2], signed=signed))
