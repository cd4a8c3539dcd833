"""The specification of the kernels, in plain PyTorch.

``factor`` unscales, averages and clips gradients in one multiplication. If ``found_inf`` is
above 0, nothing changes, not even the step counts; no line waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mezzo.engine.kernels.batch import AdamWSettings, Batch, SGDSettings
from mezzo.engine.kernels.storage import SIGNED, flat, flat_fp32, join, round_to_bf16, rounded, split, streams
from mezzo.formats import BF16


def sum_of_squares(gradients: list[Tensor]) -> Tensor:
    """Return the sum of all squares in FP64: not finite exactly when a gradient is not."""
    squares = [g.double().square().sum() for g in gradients]
    return torch.stack([s.to(squares[0].device) for s in squares]).sum()


def adamw(batch: Batch, settings: AdamWSettings, factor: Tensor, found_inf: Tensor) -> None:
    """Update like ``torch.optim.AdamW`` (Loshchilov & Hutter, arXiv:1711.05101)."""
    s = settings
    for i, weight in enumerate(batch.weights):
        gradient = flat(batch.gradients[i]).float() * (-factor if s.maximize else factor)
        step = batch.steps[i] + 1
        master = _fp32_master(weight, batch.masters[i])
        mean = _mean(_moment(batch, "exp_avg", i), gradient, s.beta1)
        square = _moment(batch, "exp_avg_sq", i) * s.beta2 + (1 - s.beta2) * gradient * gradient
        new = {"exp_avg": mean, "exp_avg_sq": square}
        if s.amsgrad:
            square = new["max_exp_avg_sq"] = torch.maximum(_moment(batch, "max_exp_avg_sq", i), square)
        exact = step.double()
        root = (1 - s.beta2**exact).sqrt().float()
        length = (s.lr / (1 - s.beta1**exact)).float()
        # One rounding of the weight; torch rounds twice, in master * (1 - lr * decay) - ..., and loses small updates.
        updated = master - (s.lr * s.weight_decay * master + length * (mean / (_root(square) / root + s.eps)))
        _write_back(batch, i, updated, step, new, found_inf)


def _mean(old: Tensor, fresh: Tensor, beta1: float) -> Tensor:
    # torch.lerp's two forms without its fused multiplication: a small beta1 must leave nothing of a large old mean.
    mostly_old = 1 - beta1 < 0.5
    return old + (fresh - old) * (1 - beta1) if mostly_old else fresh - (fresh - old) * beta1


def _root(square: Tensor) -> Tensor:
    return square.double().sqrt().float()  # correctly rounded, which torch's FP32 root on CPUs is not


def sgd(batch: Batch, settings: SGDSettings, factor: Tensor, found_inf: Tensor) -> None:
    """Update like ``torch.optim.SGD``, with momentum and Nesterov's."""
    s = settings
    for i, weight in enumerate(batch.weights):
        master = _fp32_master(weight, batch.masters[i])
        scaled = flat(batch.gradients[i]).float() * (-factor if s.maximize else factor)
        gradient = scaled + s.weight_decay * master
        step = batch.steps[i] + 1
        new = {}
        direction = gradient
        if s.momentum:
            old = _moment(batch, "momentum_buffer", i)
            buffer = torch.where(step == 1, gradient, s.momentum * old + (1 - s.dampening) * gradient)
            new["momentum_buffer"] = buffer
            direction = gradient + s.momentum * buffer if s.nesterov else buffer
        _write_back(batch, i, master - s.lr * direction, step, new, found_inf)


def _fp32_master(weight: Tensor, master: Tensor) -> Tensor:
    return join(flat(weight), flat(master)) if master.dtype is torch.int16 else flat(master).float()


def _moment(batch: Batch, name: str, i: int) -> Tensor:
    return flat_fp32(batch.moments[name][i], batch.weights[i].numel(), signed=name in SIGNED)


def _write_back(batch: Batch, i: int, updated: Tensor, step: Tensor, new: dict[str, Tensor], found_inf: Tensor) -> None:
    skips = found_inf > 0

    def put(into: Tensor, value: Tensor) -> None:
        into.copy_(torch.where(skips, into, value.to(into.dtype)))

    weight, master = batch.weights[i], batch.masters[i]
    noise = streams(weight.numel(), batch.numbers[i], step) if batch.random else (step, step, step)
    if master.dtype is torch.int16:
        high, low = split(updated)
        put(flat(weight), high)
        put(flat(master), low)
    elif weight is not master:
        put(flat(master), updated)
        put(flat(weight), updated)
    else:
        random = batch.stochastic and weight.dtype is BF16.dtype
        put(flat(weight), round_to_bf16(updated, noise[0]) if random else updated)
    put(batch.steps[i], step)
    for name, value in new.items():
        kept, signed = batch.moments[name][i], name in SIGNED
        put(flat(kept), rounded(value, kept.dtype, noise[1 if signed else 2], signed=signed))
