"""AdamW and SGD that update in one pass, straight from 16-bit gradients.

They take torch's arguments, run torch's hooks and load torch's state dicts. Beyond that they support 16-bit weights: FP32
masters and moments are in the optimizer's state, gradients are read in their own format, and one pass over the memory
unscales, clips, updates and rounds the new weights. Bytes per parameter, AdamW: 2 weight + 2 gradient + 4 master
+ 8 moments = 16 in FP16; in BF16 the master is the weight and its low bits, 14. ``moments="8bit"`` keeps 2.02 of the 8, and
``rounding="stochastic"`` trains BF16 weights that have no master: 6.02 in all.

A ``Session`` passes scale, averaging and clipping as one number on the device (``update``); ``step`` is that of a plain
optimizer.

Limits: dense gradients, dense and non-overlapping weights, no closure.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Literal

from torch import Tensor

from mezzo.engine.kernels.batch import AdamWSettings, SGDSettings
from mezzo.engine.kernels.storage import MOMENT_DTYPES
from mezzo.engine.optimizers.one_pass import OnePass
from mezzo.errors import PolicyError, SessionError


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

    _kernel = "adamw"

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
        _check_range(lr=(lr, 0, None), eps=(eps, 0, None), weight_decay=(weight_decay, 0, None))
        _check_range(beta1=(betas[0], 0, 1), beta2=(betas[1], 0, 1))
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        _check_choices(moments=(moments, tuple(MOMENT_DTYPES)), rounding=(rounding, ("nearest", "stochastic")))
        storage = {"moments": moments, "rounding": rounding}
        of_torch = {"foreach": foreach, "capturable": capturable, "differentiable": differentiable, "fused": fused}
        super().__init__(params, {**defaults, "amsgrad": amsgrad, "maximize": maximize, **of_torch, **storage})

    def _moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))

    def _settings(self, group: dict[str, Any]) -> AdamWSettings:
        beta1, beta2 = group["betas"]
        settings = {name: group[name] for name in ("eps", "weight_decay", "amsgrad", "maximize")}
        now = functools.partial(self._settings, group)
        return AdamWSettings(lr=_rate(group), beta1=beta1, beta2=beta2, now=now, **settings)


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

    _kernel = "sgd"

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
        _check_range(lr=(lr, 0, None), momentum=(momentum, 0, None), weight_decay=(weight_decay, 0, None))
        if nesterov and (momentum <= 0 or dampening != 0):
            raise PolicyError(
                f"nesterov=True with momentum={momentum} and dampening={dampening}",
                hint="Nesterov's momentum needs a momentum above 0 and no dampening",
            )
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        _check_choices(moments=(moments, tuple(MOMENT_DTYPES)), rounding=(rounding, ("nearest", "stochastic")))
        storage = {"moments": moments, "rounding": rounding}
        of_torch = {"foreach": foreach, "differentiable": differentiable, "fused": fused}
        super().__init__(params, {**defaults, "nesterov": nesterov, "maximize": maximize, **of_torch, **storage})

    def _moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def _settings(self, group: dict[str, Any]) -> SGDSettings:
        settings = {name: group[name] for name in ("momentum", "dampening", "weight_decay", "nesterov", "maximize")}
        return SGDSettings(lr=_rate(group), now=functools.partial(self._settings, group), **settings)


def _rate(group: dict[str, Any]) -> float:
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        raise SessionError(
            f"lr is a tensor on {lr.device}; allowed: a number, or a tensor on the CPU",
            hint="pass a number: it is sent to the device when it changes, and nothing waits for it",
        )
    return float(lr)


def _check_range(**settings: tuple[float | Tensor, float, float | None]) -> None:
    for name, (value, low, high) in settings.items():
        if not value >= low or (high is not None and not value < high):
            allowed = f"{low} or more" if high is None else f"from {low} to below {high}"
            raise PolicyError(f"{name}={value!r}; allowed: {allowed}", hint=f"choose {name} inside that range")


def _check_choices(**settings: tuple[str, tuple[str, ...]]) -> None:
    for name, (value, allowed) in settings.items():
        if value not in allowed:
            raise PolicyError(f"{name}={value!r}; allowed: {', '.join(allowed)}", hint=f"choose {name} from these")
