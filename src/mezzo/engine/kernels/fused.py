"""torch's own fused kernels under the same interface: where ours cannot be compiled.

The clip and the unscale factor go into ``grad_scale``, so no pass of their own is needed. Two passes more than ours:
16-bit gradients are widened into FP32 copies first (4 bytes a parameter while the update runs), and 16-bit weights
are rounded from their masters after.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mezzo.engine.gradients import total_norm
from mezzo.engine.kernels.batch import AdamWSettings, Batch, SGDSettings
from mezzo.engine.kernels.split import join, split


def sum_of_squares(gradients: list[Tensor]) -> Tensor:
    """Return the sum of all squares in FP64, from FP32 norms: infinite too where a norm leaves FP32's range."""
    return total_norm(gradients).double().square()


def adamw(batch: Batch, settings: AdamWSettings, factor: Tensor, found_inf: Tensor) -> None:
    """Update as ``torch.optim.AdamW(fused=True)`` does."""
    s, masters = settings, _open(batch)
    torch._foreach_add_(batch.steps, 1)
    torch._fused_adamw_(
        masters,
        _wide(batch.gradients),
        batch.moments["exp_avg"],
        batch.moments["exp_avg_sq"],
        batch.moments.get("max_exp_avg_sq", []),
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
    _close(batch, masters)


def sgd(batch: Batch, settings: SGDSettings, factor: Tensor, found_inf: Tensor) -> None:
    """Update as ``torch.optim.SGD(fused=True)`` does; the first update of a buffer needs all parameters to begin together."""
    s, masters = settings, _open(batch)
    buffers = batch.moments.get("momentum_buffer", [])
    # torch asks one question for all: is this the first update? With dampening 0 a buffer of zeros gives the same answer by itself.
    first = bool(buffers) and s.dampening != 0 and all(bool(step == 0) for step in batch.steps)
    torch._fused_sgd_(
        masters,
        _wide(batch.gradients),
        buffers,
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
    _close(batch, masters)


def _wide(gradients: list[Tensor]) -> list[Tensor]:
    return [
        g.float().clone() if g.element_size() == 4 else g.float() for g in gradients
    ]  # the kernel unscales in place


def _open(batch: Batch) -> list[Tensor]:
    pairs = zip(batch.weights, batch.masters, strict=True)
    return [join(w, m) if m.dtype is torch.int16 else m.float() for w, m in pairs]


def _close(batch: Batch, masters: list[Tensor]) -> None:
    for weight, kept, updated in zip(batch.weights, batch.masters, masters, strict=True):
        if kept.dtype is torch.int16:
            high, low = split(updated)
            weight.copy_(high)
            kept.copy_(low)
        elif weight is not updated:
            weight.copy_(updated)
