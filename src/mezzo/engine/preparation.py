"""Bring models and optimizers into the state that a policy wants, in the one right order: masters are taken before weights are cast."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from mezzo.engine import checks, conversion
from mezzo.engine.kernels.choice import choose
from mezzo.engine.master import NoMasters, masters_for
from mezzo.engine.optimizers import OnePass
from mezzo.explain import Choice
from mezzo.policy import Policy


def choose_update(
    optimizers: Sequence[torch.optim.Optimizer], device_type: str, clip_value: float | None
) -> tuple[bool, Choice]:
    """Return whether gradients are handed to one-pass kernels as they are, and why."""
    if clip_value is not None:
        return False, Choice(what="update", value="optimizers' own step", reason="clip_value changes single elements")
    if not all(isinstance(o, OnePass) for o in optimizers):
        reason = "not all optimizers are mezzo.AdamW or mezzo.SGD"
        return False, Choice(what="update", value="optimizers' own step", reason=reason)
    return True, Choice(what="update", value="one pass", reason=choose(device_type)[1])


def prepare(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    policy: Policy,
    device_type: str,
    *,
    one_pass: bool,
) -> NoMasters:
    """Convert ``models`` and ``optimizers`` in place and return what holds the FP32 masters.

    Args:
        models: in FP32.
        optimizers: those that will update.
        policy: what to bring about.
        device_type: torch's device type of the models.
        one_pass: whether the optimizers read 16-bit gradients themselves.
    """
    if policy.casting == "ops":
        for model in models:
            checks.refuse_half(model, policy)
            conversion.keep_fp32(model, policy, device_type)
    elif policy.casting == "model":
        parameters = [p for model in models for p in model.parameters()]
        masters = masters_for(optimizers, parameters, keep=policy.master_weights, one_pass=one_pass)
        for model in models:
            conversion.cast_model(model, policy, device_type)
        masters.begin(optimizers)
        return masters
    elif policy.compute == "tf32":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.cudnn.conv.fp32_precision = "tf32"  # type: ignore[attr-defined]
    elif device_type == "cuda":  # fp32: torch computes convolutions in TF32 unless told otherwise
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
    return NoMasters()
