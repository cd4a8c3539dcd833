"""Stochastic gradient descent in one pass, straight from 16-bit gradients, with masters and moments as ``adamw`` has them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from mezzo.engine.kernels.reference import Rule, SGDSettings, Values
from mezzo.engine.optimizers.one_pass import OnePass, check_range, rate
from mezzo.errors import PolicyError


def _sgd(values: Values, settings: SGDSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what ``torch.optim.SGD`` would make of a weight and its momentum."""
    s, weight = settings, values.weight
    gradient = values.gradient + s.weight_decay * weight
    if not s.momentum:
        return weight - s.lr * gradient, {}
    kept = s.momentum * values.moments["momentum_buffer"] + (1 - s.dampening) * gradient
    buffer = torch.where(values.step == 1, gradient, kept)
    direction = gradient + s.momentum * buffer if s.nesterov else buffer
    return weight - s.lr * direction, {"momentum_buffer": buffer}


class SGD(OnePass):
    """Stochastic gradient descent, with momentum as torch defines it, in one pass.

    Args:
        params: as for ``torch.optim.SGD``; FP32, FP16 or BF16.
        lr: learning rate.
        momentum: share of the last direction that is kept.
        dampening: share of the gradient that is left out of the buffer.
        weight_decay: a share of the weight that is added to the gradient.
        nesterov: look ahead along the momentum.
        maximize: ascend the gradient.
        foreach, differentiable, fused: torch's ways to compute an update, kept in the groups as in torch, but without
            effect: the device decides, and no gradient flows through an update.
        moments: the format of the moments: 4, 2 or 1.01 bytes each; stochastically rounded below FP32.
        rounding: how BF16 weights without masters are rounded; ``stochastic`` weights have no masters.

    Raises:
        PolicyError: a setting is outside its range.
    """

    _rule = Rule(formula=_sgd, kernel="sgd")

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        moments: Literal["fp32", "bf16", "8bit"] = "fp32",
        rounding: Literal["nearest", "stochastic"] = "nearest",
    ) -> None:
        check_range(lr=(lr, 0, None), momentum=(momentum, 0, None), weight_decay=(weight_decay, 0, None))
        if nesterov and (momentum <= 0 or dampening != 0):
            raise PolicyError(
                f"nesterov=True with momentum={momentum} and dampening={dampening}",
                hint="Nesterov's momentum needs a momentum above 0 and no dampening",
            )
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        storage = {"moments": moments, "rounding": rounding}
        of_torch = {"foreach": foreach, "differentiable": differentiable, "fused": fused}
        super().__init__(params, {**defaults, "nesterov": nesterov, "maximize": maximize, **of_torch, **storage})

    def _moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def _settings(self, group: dict[str, Any]) -> SGDSettings:
        settings = {name: group[name] for name in ("momentum", "dampening", "weight_decay", "nesterov", "maximize")}
        return SGDSettings(lr=rate(group), now=functools.partial(self._settings, group), **settings)
