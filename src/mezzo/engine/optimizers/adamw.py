"""AdamW in one pass, straight from 16-bit gradients.

It takes torch's arguments, runs torch's hooks and loads torch's state dicts. Beyond that it supports 16-bit weights: FP32
masters and moments are in the optimizer's state, gradients are read in their own format, and one pass over the memory
unscales, clips, updates and rounds the new weights. Bytes per parameter, AdamW: 2 weight + 2 gradient + 4 master
+ 8 moments = 16 in FP16; in BF16 the master is the weight and its low bits, 14. ``moments="8bit"`` keeps 2.02 of the 8, and
``rounding="stochastic"`` trains BF16 weights that have no master: 6.02 in all.

A ``Session`` passes scale, averaging and clipping as one number on the device (``update``); ``step`` is a plain
optimizer.

Limits: dense gradients, dense and non-overlapping weights, no closure.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from mezzo.engine.kernels.reference import AdamWSettings, Rule, Values
from mezzo.engine.optimizers.one_pass import OnePass, check_range, rate


def _adamw(values: Values, settings: AdamWSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what ``torch.optim.AdamW`` would make of a weight and its moments."""
    s, (weight, gradient, moments, step, _) = settings, values
    mean = _mean(moments["exp_avg"], gradient, s.beta1)
    square = moments["exp_avg_sq"] * s.beta2 + (1 - s.beta2) * gradient * gradient
    new = {"exp_avg": mean, "exp_avg_sq": square}
    if s.amsgrad:
        square = new["max_exp_avg_sq"] = torch.maximum(moments["max_exp_avg_sq"], square)
    exact = step.double()
    root = (1 - s.beta2**exact).sqrt().float()
    length = (s.lr / (1 - s.beta1**exact)).float()
    # One rounding of the weight; torch rounds twice, in weight * (1 - lr * decay) - ..., and loses small updates.
    return weight - (s.lr * s.weight_decay * weight + length * (mean / (_root(square) / root + s.eps))), new


def _mean(old: Tensor, fresh: Tensor, beta1: float) -> Tensor:
    # torch.lerp's two forms without its fused multiplication: a small beta1 must leave nothing of a large old mean.
    mostly_old = 1 - beta1 < 0.5
    return old + (fresh - old) * (1 - beta1) if mostly_old else fresh - (fresh - old) * beta1


def _root(square: Tensor) -> Tensor:
    return square.double().sqrt().float()  # correctly rounded, which torch's FP32 root on CPUs is not


ADAMW = Rule(formula=_adamw, kernel="adamw")


def moments_of(group: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the moments of a group that AdamW trains."""
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))


def settings_of(group: dict[str, Any], now: Callable[[], AdamWSettings]) -> AdamWSettings:
    """Return the settings of a group that AdamW trains; ``now`` returns them later."""
    beta1, beta2 = group["betas"]
    settings = {name: group[name] for name in ("eps", "weight_decay", "amsgrad", "maximize")}
    return AdamWSettings(lr=rate(group), beta1=beta1, beta2=beta2, now=now, **settings)


class AdamW(OnePass):
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) in one pass.

    Args:
        params: as for ``torch.optim.AdamW``; FP32, FP16 or BF16.
        lr: learning rate.
        betas: decay of the means of gradients and of their squares.
        eps: added to the root of the second.
        weight_decay: decoupled; a share of the weight times ``lr``.
        amsgrad: use the largest second mean so far.
        maximize: ascend the gradient.
        foreach, capturable, differentiable, fused: torch's ways to compute an update, kept in the groups as in torch, but
            without effect: the device decides, and no gradient flows through an update.
        moments: the format of the moments: 4, 2 or 1.01 bytes each; stochastically rounded below FP32.
        rounding: how BF16 weights without masters are rounded; ``stochastic`` weights have no masters.

    Raises:
        PolicyError: a setting is outside its range.
    """

    _rule = ADAMW

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        moments: Literal["fp32", "bf16", "8bit"] = "fp32",
        rounding: Literal["nearest", "stochastic"] = "nearest",
    ) -> None:
        check_range(lr=(lr, 0, None), eps=(eps, 0, None), weight_decay=(weight_decay, 0, None))
        check_range(beta1=(betas[0], 0, 1), beta2=(betas[1], 0, 1))
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        storage = {"moments": moments, "rounding": rounding}
        of_torch = {"foreach": foreach, "capturable": capturable, "differentiable": differentiable, "fused": fused}
        super().__init__(params, {**defaults, "amsgrad": amsgrad, "maximize": maximize, **of_torch, **storage})

    def _moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return moments_of(group)

    def _settings(self, group: dict[str, Any]) -> AdamWSettings:
        return settings_of(group, functools.partial(self._settings, group))
