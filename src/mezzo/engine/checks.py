"""What a session refuses, and what it warns of: each with what was passed, what is allowed and what to do."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.engine.gradients import worst
from mezzo.errors import NonFiniteLossError, ScaleFloorError, SessionError
from mezzo.formats import FP32, FP64
from mezzo.policy import Policy


class PrecisionWarning(UserWarning):
    """Warn that a chosen format loses what training needs, or is used nowhere."""


def check_settings(*, counts: Mapping[str, Any], limits: Mapping[str, Any]) -> None:
    """Refuse counts that are not whole numbers of 1 or more, and limits that are neither None nor above 0."""
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise SessionError(
                f"{name}={count!r}; allowed: a whole number of 1 or more",
                hint=f"leave {name} out for 1",
            )
    for name, limit in limits.items():
        if limit is not None and not limit > 0:
            raise SessionError(
                f"{name}={limit!r}; allowed: a number above 0, or None",
                hint=f"leave {name} out not to clip",
            )


def check_optimizers(optimizers: Sequence[torch.optim.Optimizer], schedulers: Iterable[Any]) -> None:
    """Refuse closures, a parameter in two optimizers and a scheduler that needs a metric."""
    seen: dict[nn.Parameter, int] = {}
    for number, optimizer in enumerate(optimizers):
        _refuse_closure(optimizer)
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if seen.setdefault(parameter, number) != number:
                raise SessionError(
                    f"optimizers {seen[parameter]} and {number} share a parameter of shape {tuple(parameter.shape)}",
                    hint="give every parameter to one optimizer: it would be updated twice",
                )
    for scheduler in schedulers:
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise SessionError(
                "ReduceLROnPlateau steps on a metric that the session does not know",
                hint="leave it out of the session and call scheduler.step(metric) yourself",
            )


def device_of(parameters: Sequence[nn.Parameter]) -> torch.device:
    """Return the first parameter's device; refuse a model that has no parameter."""
    if not parameters:
        raise SessionError(
            "the model has no parameters; allowed: a module, or several, with at least one",
            hint="pass the module whose parameters the optimizer has",
        )
    return parameters[0].device


def known(chosen: Sequence[torch.optim.Optimizer], own: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return the optimizers ``chosen`` for an update; refuse one that the session was not built with."""
    for optimizer in chosen:
        if optimizer not in own:
            raise SessionError(
                f"update() got {type(optimizer).__name__}, which is none of this session's {len(own)} optimizers",
                hint="name optimizers that the session was built with, or none to update all",
            )
    return list(chosen)


def _refuse_closure(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise SessionError(
            "LBFGS evaluates the loss several times an update through a closure; a session has one backward pass",
            hint="train with LBFGS in FP32, or run the script under mezzo run, which handles closures",
        )


def refuse_half(model: nn.Module, policy: Policy) -> None:
    """Refuse 16-bit weights under a policy that keeps weights in FP32."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype not in (FP32.dtype, FP64.dtype):
            raise SessionError(
                f"parameter {name!r} is {parameter.dtype}, and policy {policy!s} keeps weights in FP32",
                hint="leave the model in FP32; policies ending in -master and -pure cast it themselves",
            )


def _describe(loss: Any) -> str:
    if isinstance(loss, Tensor):
        return f"a tensor of shape {tuple(loss.shape)} with requires_grad={loss.requires_grad}"
    return repr(loss)


def check_unscale(*, calls: int, unscaled: bool) -> None:
    """Refuse to unscale nothing, or a window twice."""
    if calls == 0:
        raise SessionError(
            "unscale() without a backward pass since the last update",
            hint="call step(loss) or backward(loss) first",
        )
    if unscaled:
        raise SessionError(
            "unscale() was already called since the last update",
            hint="call it once a window; unscaling twice would divide the gradients twice",
        )


def no_backward() -> SessionError:
    """Return the error of an update of a window without a backward pass."""
    return SessionError(
        "update() without a backward pass since the last update",
        hint="call step(loss) or backward(loss) first; to update several optimizers from one backward pass "
        "call update() or update(first, second) once",
    )


def may_lose_updates(policy: Policy, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Return whether updates are rounded to nearest into 16-bit weights."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    stochastic = all(group.get("rounding") == "stochastic" for group in groups)
    return policy.casting == "model" and not policy.master_weights and not stochastic


def snapshot(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return copies of the weights that are trained."""
    return [p.detach().clone() for p in parameters if p.requires_grad]


def warn_of_lost_updates(before: list[Tensor], parameters: Iterable[nn.Parameter], policy: Policy) -> None:
    """Warn when most weights did not change in an update since the ``snapshot`` before it."""
    after = [p.detach() for p in parameters if p.requires_grad]
    total = sum(t.numel() for t in before)
    same = sum(int((a == b).sum()) for a, b in zip(before, after, strict=True))
    if total and same > total / 2:
        warnings.warn(
            f"{same / total:.0%} of {total} weights did not change in the first update under policy {policy!s}: "
            f"updates below half a unit in the last place are lost; use {policy.compute}-master",
            PrecisionWarning,
            stacklevel=4,
        )


def check_loss(loss: Any, *, first: bool) -> None:
    """Refuse a loss that cannot be differentiated or, before the first update, is not finite (waits for the device then)."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise SessionError(
            f"backward() got {_describe(loss)}; a loss is one number that depends on the model",
            hint="pass the mean loss of the micro-batch, computed from the model's output",
        )
    if first and not math.isfinite(loss.item()):
        raise NonFiniteLossError(
            f"the loss is {loss.item()} before the first update",
            hint="no loss scale can help: look at the data and at the forward pass, and compare with policy fp32",
        )


def check_backward(weight: float | None, loss_id: int, num_losses: int, *, unscaled: bool) -> None:
    """Refuse a weight that is not above 0, the number of a loss that has no scale, and a window that was unscaled."""
    if unscaled:
        raise SessionError(
            "backward() after unscale(): scaled gradients would be added to unscaled ones",
            hint="call update() first",
        )
    if not 0 <= loss_id < num_losses:
        raise SessionError(
            f"loss_id={loss_id}; allowed: 0 to {num_losses - 1}",
            hint="build the session with num_losses as large as the number of losses",
        )
    if weight is not None and not weight > 0:
        raise SessionError(
            f"weight={weight!r}; allowed: a number above 0",
            hint="pass the number of samples or tokens that the loss is the mean of",
        )


def check_state(state: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Refuse a saved state with other numbers of models, optimizers, schedulers or losses than this session's own."""
    for part in ("models", "optimizers", "schedulers", "scales"):
        if len(state.get(part, ())) != len(mine[part]):
            raise SessionError(
                f"the state has {len(state.get(part, ()))} {part}, this session {len(mine[part])}",
                hint="build the session as the one that saved the state was built",
            )


def check_shares(shares: Sequence[float]) -> None:
    """Refuse losses whose micro-batches have different total weights: no one number would average them."""
    if len({round(share, 9) for share in shares if share}) > 1:
        listed = ", ".join(f"loss {i}: {share:g}" for i, share in enumerate(shares) if share)
        raise SessionError(
            f"the losses of this window have different total weights ({listed} of a full window)",
            hint="give every loss of a micro-batch that micro-batch's weight",
        )


def floor_error(policy: Policy, named: Iterable[tuple[str, Tensor | None]]) -> ScaleFloorError:
    """Return the error of gradients that overflow at the loss scale's floor; names the worst of the ``named`` ones."""
    return ScaleFloorError(
        f"gradients overflow at the loss scale's floor of {policy.min_scale:g}; not finite: {worst(named)}",
        hint="keep the modules of these tensors in FP32 (fp32_modules=...), or use policy bf16, which has FP32's range",
    )


def refuse_half_gradients(gradients: Sequence[Tensor]) -> None:
    """Refuse to unscale 16-bit gradients in place: what the loss scale kept from underflow would be lost."""
    if any(g.element_size() == 2 for g in gradients):
        raise SessionError(
            "unscale() with gradients in 16 bits, which one-pass optimizers read as they are",
            hint="use clip_norm, or torch's optimizer, whose masters get FP32 gradients",
        )
