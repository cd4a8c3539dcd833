"""Adafactor over master weights: a matrix's second moments as the means of its rows and of its columns.

torch's ``eps=(None, ...)`` means the machine epsilon of the weights' format: 1.2e-7 in FP32, 0.0078 in BF16. It bounds the root of
the second moment from below, so the same model in BF16 hardly moves where gradients are smaller than 0.0078. Here the update is computed in
FP32 and ``None`` means FP32's epsilon, whatever the weights' format.

The factors are of the whole matrix, and every process has all of them: a sharded weight and its gradient are gathered for an update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mezzo.engine.kernels.reference import Rule, Values
from mezzo.engine.optimizers.one_pass import OnePass, check_range, rate
from mezzo.errors import PolicyError
from mezzo.formats import FP32


@dataclass(frozen=True, kw_only=True)
class AdafactorSettings:
    """A group's settings for one update, with the names of ``torch.optim.Adafactor``."""

    lr: float
    beta2_decay: float
    eps: tuple[float, float]
    d: float
    weight_decay: float
    maximize: bool


def _adafactor(values: Values, settings: AdafactorSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what ``torch.optim.Adafactor`` would make of an FP32 weight and its factors."""
    s, (floor, smallest) = settings, settings.eps
    gradient, weight = values.spread.whole(values.gradient), values.spread.whole(values.weight)
    new = dict(values.moments)
    fresh = values.step**s.beta2_decay

    def mean(name: str, now: Tensor) -> Tensor:
        new[name] = torch.lerp(new[name].view(now.shape), now, fresh)
        return new[name]

    if gradient.ndim > 1:
        rows = mean("row_var", _rms(gradient, -1).square())
        columns = mean("col_var", _rms(gradient, -2).square())
        estimate = (rows / rows.mean(-2, keepdim=True).clamp(min=floor)) @ columns
    else:
        estimate = mean("variance", gradient.square()).clone()
    update = estimate.clamp_(min=floor * floor).rsqrt_().mul_(gradient)  # in place: these are as large as the weight
    length = values.step.rsqrt().clamp(max=s.lr) * _rms(weight).clamp(min=smallest)
    update.mul_(length / (_rms(update) / s.d).clamp(min=1.0))
    update.add_(weight, alpha=s.lr * s.weight_decay)  # before the weight, which is rounded once, as in AdamW
    return values.spread.part(torch.sub(weight, update, out=update)), new


def _rms(tensor: Tensor, dim: int | None = None) -> Tensor:
    """Return the root mean square of all elements, or along a dimension, which is kept."""
    count = tensor.numel() if dim is None else tensor.size(dim)
    norm: Tensor = torch.linalg.vector_norm(tensor, dim=dim, keepdim=dim is not None)
    return norm / math.sqrt(count)


def _shape(name: str, weight: torch.Size) -> torch.Size:
    """Return the shape of a factor; of what a weight of so many dimensions does not have, an empty one."""
    if (len(weight) > 1) is (name == "variance"):
        return torch.Size([0])
    if name == "row_var":
        return torch.Size([*weight[:-1], 1])
    return torch.Size([*weight[:-2], 1, weight[-1]]) if name == "col_var" else weight


class Adafactor(OnePass):
    """Adafactor (Shazeer & Stern, arXiv:1804.04235), as torch defines it, over FP32 masters.

    Args:
        params: as for ``torch.optim.Adafactor``; FP32, FP16 or BF16.
        lr: the most that the relative step size can be, and weight decay's factor.
        beta2_decay: exponent of the decay of the second moments: their newest part is ``step ** beta2_decay``.
        eps: the least root of a second moment, and the least root mean square of a weight that steps are relative to.
            None for the first is FP32's machine epsilon, also if the weights are in 16 bits.
        d: largest root mean square of an update, before the step size.
        weight_decay: decoupled; a share of the weight times ``lr``.
        foreach: torch's way to compute an update, kept in the groups as in torch, but without effect.
        maximize: ascend the gradient.
        moments: the format of the factors: 4, 2 or 1.01 bytes each; stochastically rounded below FP32.
        rounding: how BF16 weights without masters are rounded; ``stochastic`` weights have no masters.

    Raises:
        PolicyError: a setting is outside its range.
    """

    _rule = Rule(formula=_adafactor, whole_matrices=True, moment_shape=_shape)

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        moments: Literal["fp32", "bf16", "8bit"] = "fp32",
        rounding: Literal["nearest", "stochastic"] = "nearest",
    ) -> None:
        check_range(lr=(lr, 0, None), d=(d, 1, None), weight_decay=(weight_decay, 0, None))
        check_range(eps1=(eps[0] or 0.0, 0, None), eps2=(eps[1], 0, None))
        if not beta2_decay <= 0:
            raise PolicyError(
                f"beta2_decay={beta2_decay!r}; allowed: 0 or less", hint="choose beta2_decay inside that range"
            )
        defaults = {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay}
        storage = {"moments": moments, "rounding": rounding}
        super().__init__(params, {**defaults, "foreach": foreach, "maximize": maximize, **storage})

    def _moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("row_var", "col_var", "variance")

    def _settings(self, group: dict[str, Any]) -> AdafactorSettings:
        floor, smallest = group["eps"]
        eps = (FP32.eps if floor is None else floor, smallest)
        names = ("beta2_decay", "d", "weight_decay", "maximize")
        return AdafactorSettings(lr=rate(group), eps=eps, **{name: group[name] for name in names})
