"""An optimizer whose update needs whole matrices: it is a formula, and a session trains with it as with any other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
from helpers_engine import batches, same_bits
from mezzo.engine.kernels.reference import Rule, Values
from mezzo.engine.optimizers.one_pass import OnePass

LR, MOMENTUM, CLIP = 0.05, 0.9, 0.5


@dataclass(frozen=True, kw_only=True)
class Settings:
    lr: float
    maximize: bool = False


def straightened(matrix: Tensor) -> Tensor:
    """One step of Newton and Schulz towards the nearest matrix whose singular values are 1."""
    unit = matrix / (matrix.norm() + 1e-12)
    return unit if matrix.ndim < 2 else 1.5 * unit - 0.5 * unit @ unit.mT @ unit


def formula(values: Values, settings: Settings) -> tuple[Tensor, dict[str, Tensor]]:
    moment = MOMENTUM * values.moments["moment"] + values.gradient
    return values.weight - settings.lr * straightened(moment), {"moment": moment}


class Straight(OnePass):
    _rule = Rule(formula=formula, whole_matrices=True)

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": LR, "moments": "fp32", "rounding": "nearest"})

    def _moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("moment",)

    def _settings(self, group: dict[str, Any]) -> Any:
        return Settings(lr=group["lr"])


def network() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].weight = nn.Parameter(model[0].weight.detach().mT.contiguous().mT)  # columns one after the other in memory
    return model


def by_hand(seen: list[list[Tensor]]) -> list[Tensor]:
    """The same updates in float64, from the gradients of the 16-bit model, unscaled."""
    weights = [p.detach().double() for p in network().parameters()]
    moments = [torch.zeros_like(w) for w in weights]
    for gradients in seen:
        wide = [g.double() for g in gradients]
        if not all(bool(g.isfinite().all()) for g in wide):
            continue
        norm = math.sqrt(sum(float(g.square().sum()) for g in wide))
        factor = min(1.0, CLIP / norm)
        for i, gradient in enumerate(wide):
            moments[i] = MOMENTUM * moments[i] + gradient * factor
            weights[i] = weights[i] - LR * straightened(moments[i])
    return weights


@pytest.mark.parametrize("hooked", [False, True], ids=["one pass", "the optimizer's own step"])
@pytest.mark.parametrize("policy", ["fp32", "fp16-master", "bf16-master"])
def test_a_session_trains_with_it(policy: str, hooked: bool) -> None:
    model, scale = network(), 64.0
    optimizer = Straight(model.parameters())
    if hooked:
        optimizer.register_step_post_hook(lambda *_: None)
    loss_scale = f":loss_scale=static:init_scale={scale:g}" if policy == "fp16-master" else ""
    session = mezzo.Session(model, optimizer, policy=policy + loss_scale, clip_norm=CLIP)
    seen = []
    for number, (x, y) in enumerate(batches(6)):
        with session.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        overflows = number == 2 and policy == "fp16-master"
        session.backward(loss * 1e7 if overflows else loss)
        used = scale if policy == "fp16-master" else 1.0
        seen.append([p.grad.detach().double() / used for p in model.parameters()])
        session.update()

    # Hooks see gradients that are unscaled and clipped in their own format, which rounds each of the updates.
    rounding = torch.finfo(next(model.parameters()).dtype).eps if hooked else torch.finfo(torch.float).eps
    tolerance = 2 * len(seen) * LR * rounding + 1e-6
    assert session.skipped == (policy == "fp16-master")
    for parameter, expected in zip(model.parameters(), by_hand(seen), strict=True):
        master = optimizer.master(parameter)
        kept = parameter.detach() if master is None else master
        torch.testing.assert_close(kept.double(), expected, rtol=0, atol=tolerance)
        assert same_bits([parameter.detach()], [kept.to(parameter.dtype)]) or policy == "bf16-master"
    said = [choice.reason for choice in session.explain() if choice.what == "update"]
    plain = "plain torch operations: Straight has no kernel for cpu"
    hooks = "an optimizer has step hooks, which see true gradients, in FP32"
    assert said == [hooks if hooked and policy != "fp32" else plain]
