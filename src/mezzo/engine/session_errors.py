"""Errors and warnings of a session's calls: each says what was passed, what is allowed and what to do."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mezzo import error_texts
from mezzo.engine.gradients import parameters_of, worst_gradients
from mezzo.engine.optimizers.master_weights import NoMasters
from mezzo.engine.optimizers.one_pass import have_hooks
from mezzo.errors import NonFiniteLossError, ScaleFloorError, SessionError
from mezzo.policy import Policy


class PrecisionWarning(UserWarning):
    """A chosen format that loses values which training needs, or that is not used at all."""


def warn(text: str) -> None:
    """Warn once, at the line of the script that called into Mezzo."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("mezzo."):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, PrecisionWarning, stacklevel=level)


def check_chosen(
    chosen: Sequence[torch.optim.Optimizer], available: Sequence[torch.optim.Optimizer]
) -> list[torch.optim.Optimizer]:
    """Return the optimizers ``chosen`` for an update; refuse others than the session's."""
    for optimizer in chosen:
        if optimizer not in available:
            raise SessionError(
                f"update() got {type(optimizer).__name__}, which is not one of this session's {len(available)} optimizers",
                hint="pass optimizers that the session was built with, or none to update all",
            )
    return list(chosen)


def check_rates(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuse a learning rate that would make the weights NaN; one in a tensor is not read."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = group.get("lr", 0.0)
            if rate.__class__ is float and not -math.inf < rate < math.inf:
                raise SessionError(
                    f"the learning rate of {type(optimizer).__name__} is {rate}; allowed: a finite number",
                    hint="look at what the script or its scheduler computes; no weight has been changed",
                )


def _describe(loss: Any) -> str:
    if isinstance(loss, Tensor):
        kind = "complex tensor" if loss.is_complex() else "tensor"
        off = "" if torch.is_grad_enabled() else ", while gradients are off"
        return f"a {kind} of shape {tuple(loss.shape)} with requires_grad={loss.requires_grad}{off}"
    return repr(loss)


def check_unscale(*, calls: int, unscaled: bool) -> None:
    """Refuse to unscale an empty window, or one window twice."""
    if calls == 0:
        raise SessionError(
            "unscale() without a backward pass since the last update",
            hint="call step(loss) or backward(loss) first",
        )
    if unscaled:
        raise SessionError(
            "unscale() was already called since the last update",
            hint="call it once per window; unscaling twice would divide the gradients twice",
        )


def no_backward() -> SessionError:
    """Return the error for updating a window without a backward pass."""
    return SessionError(
        "update() without a backward pass since the last update",
        hint="call step(loss) or backward(loss) first; to update several optimizers from one backward pass "
        "call update() or update(first, second) once",
    )


def taken_over() -> SessionError:
    """Return the error for a backward pass of a session whose model now belongs to another session."""
    return SessionError(
        "backward() of a session whose model was passed to another session since; allowed: the newer session",
        hint="use one session at a time; models that are trained in turn can share one: "
        "Session([first, second], [first_optimizer, second_optimizer]), then update(first_optimizer)",
    )


def no_gradients() -> SessionError:
    """Return the error for an update in which no parameter of the optimizers has a gradient."""
    return SessionError(
        "no parameter of the optimizers has a gradient after the backward pass: the loss does not depend on them",
        hint="compute the loss from the output of the session's own model, and pass the optimizers of the models that it "
        "reaches: update(optimizer)",
    )


def no_copy() -> SessionError:
    """Return the error for copying or pickling a session."""
    return SessionError(
        "a session was copied or pickled; allowed: its state",
        hint="copy the model, build its optimizer and a new session, then new.load_state_dict(session.state_dict())",
    )


def may_lose_updates(policy: Policy, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Return whether updates are rounded to nearest into 16-bit weights."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    stochastic = all(group.get("rounding") == "stochastic" for group in groups)
    return policy.casting == "model" and not policy.master_weights and not stochastic


def weight_copies(models: Iterable[nn.Module]) -> list[Tensor]:
    """Return copies of the trained weights."""
    return [p.detach().clone() for p in parameters_of(models) if p.requires_grad]


def warn_of_lost_window(calls: int) -> None:
    """Warn that a window's earlier micro-batches are dropped, since a failed backward pass added part of its gradients to theirs."""
    warn(
        f"a backward pass failed; the {calls} micro-batches before it in its window are dropped, because part of its gradients was added "
        "to theirs; the window begins again"
    )


def warn_of_lost_updates(before: list[Tensor], models: Iterable[nn.Module], policy: Policy) -> None:
    """Warn when most weights did not change in an update since the ``weight_copies`` before it."""
    after = [p.detach() for p in parameters_of(models) if p.requires_grad]
    total = sum(t.numel() for t in before)
    same = sum(int((a == b).sum()) for a, b in zip(before, after, strict=True))
    if total and same > total / 2:
        warn(
            f"{same / total:.0%} of {total} weights did not change in the first update under policy {policy!s}: "
            f"updates below half a unit in the last place are lost; use {policy.compute}-master"
        )


def no_loss(loss: Any) -> SessionError:
    """Return the error for a backward pass of something that is not one number computed from the model."""
    frozen = isinstance(loss, Tensor) and not (loss.requires_grad and torch.is_grad_enabled())
    return SessionError(
        f"backward() got {_describe(loss)}; a loss is one number that depends on the model",
        hint="compute it from the model's output, outside torch.no_grad(), with parameters that require gradients"
        if frozen
        else "pass the mean loss of the micro-batch, computed from the model's output",
    )


def is_of_freed_graph(error: BaseException) -> bool:
    """Return whether torch refused to go backward through a graph that a backward pass has freed."""
    return isinstance(error, RuntimeError) and error_texts.is_of_freed_graph(str(error))


def used_twice() -> SessionError:
    """Return the error for a second backward pass through one graph."""
    return SessionError(
        "backward() of a loss whose graph a backward pass has freed; allowed: one pass for each forward pass",
        hint="compute the loss again; for several losses of one forward pass, backward(first, retain_graph=True), then backward(second)",
    )


def first_loss_not_finite(loss: str) -> NonFiniteLossError:
    """Return the error for a first loss that is not finite; ``loss`` says what it is."""
    return NonFiniteLossError(
        f"the loss is {loss} before the first update",
        hint="no loss scale can help: check the data and the forward pass, and compare with policy fp32",
    )


def check_backward(weight: float | None, loss_id: int, num_losses: int, *, unscaled: bool) -> None:
    """Refuse a weight of 0 or less, a ``loss_id`` without a scale, and a window that was unscaled."""
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


def check_state(state: Mapping[str, Any], parts_of_session: Mapping[str, Any]) -> None:
    """Refuse a saved state whose numbers of models, optimizers, schedulers or losses differ from this session's."""
    for part in ("models", "optimizers", "schedulers", "scales"):
        if len(state.get(part, ())) != len(parts_of_session[part]):
            raise SessionError(
                f"the state has {len(state.get(part, ()))} {part}, this session {len(parts_of_session[part])}",
                hint="build the session as it was when it saved the state",
            )


def check_shares(shares: Sequence[float]) -> None:
    """Refuse losses whose micro-batches have different total weights: no single factor would average them."""
    if len({round(share, 9) for share in shares if share}) > 1:
        listed = ", ".join(f"loss {i}: {share:g}" for i, share in enumerate(shares) if share)
        raise SessionError(
            f"the losses of this window have different total weights ({listed} of a full window)",
            hint="give every loss of a micro-batch that micro-batch's weight",
        )


def floor_error(policy: Policy, models: Iterable[nn.Module], masters: NoMasters) -> ScaleFloorError:
    """Return the error for gradients that overflow at the loss scale's floor; names the worst."""
    named = [(name, masters.gradient(p)) for model in models for name, p in model.named_parameters()]
    return ScaleFloorError(
        f"gradients overflow at the loss scale's floor of {policy.min_scale:g}; not finite: {worst_gradients(named)}",
        hint="keep the modules of these tensors in FP32 (fp32_modules=...), or use policy bf16, which has FP32's range",
    )


def refuse_half_gradients(gradients: Sequence[Tensor]) -> None:
    """Refuse to unscale 16-bit gradients in place: the loss scale would no longer protect them from underflow."""
    if any(g.element_size() == 2 for g in gradients):
        raise SessionError(
            "unscale() with gradients in 16 bits, which one-pass optimizers read as they are",
            hint="use clip_norm, or torch's optimizer, whose masters get FP32 gradients",
        )


def shown_to_hooks(optimizers: Sequence[torch.optim.Optimizer], gradients: Sequence[Tensor]) -> bool:
    """Return whether step hooks will see these gradients; refuse 16-bit ones, which still carry the loss scale.

    Raises:
        SessionError: a gradient that a hook would see is in 16 bits.
    """
    if not have_hooks(optimizers):
        return False
    if any(g.element_size() == 2 for g in gradients):
        raise SessionError(
            "a step hook was registered after the session was built, and its optimizers read 16-bit gradients as they are; allowed: before",
            hint="register hooks before Session(...): the update then shows them true gradients in FP32",
        )
    return True
