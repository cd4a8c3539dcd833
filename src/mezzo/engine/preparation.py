"""Prepare models and optimizers for a policy, in the only correct order: masters are copied before weights are cast."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from mezzo.devices import this_device
from mezzo.engine import arguments, checks
from mezzo.engine.casts import conversion
from mezzo.engine.casts.casting import Casting
from mezzo.engine.kernels.choice import choose
from mezzo.engine.matrix_units import fp8_torchao
from mezzo.engine.matrix_units.fp32_products import set_fp32_products
from mezzo.engine.optimizers.master_weights import NoMasters, masters_for
from mezzo.engine.optimizers.one_pass import OnePass
from mezzo.engine.optimizers.step_hooks import have_hooks, step_is_own
from mezzo.engine.processes import replicas
from mezzo.explain import Choice
from mezzo.policy import Policy

ONE_PASS = "one pass"
"""The value of ``choose_update``'s choice if the optimizers' own kernels read scaled gradients."""


def listed(value: Any) -> list[Any]:
    """Return a model, an optimizer or a scheduler as a list of one, and several as a list."""
    single = isinstance(value, nn.Module) or not isinstance(value, Iterable)
    return [value] if single else list(value)


def choose_update(
    optimizers: Sequence[torch.optim.Optimizer], device: torch.device, clip_value: float | None, policy: Policy
) -> tuple[bool, Choice]:
    """Return whether one-pass kernels read gradients as they are, and why."""
    reason = None
    if clip_value is not None:
        reason = "clip_value changes single elements"
    elif not all(isinstance(o, OnePass) for o in optimizers):
        reason = "not all optimizers are mezzo.AdamW or mezzo.SGD"
    elif not all(step_is_own(o) for o in optimizers):
        reason = "an optimizer's step was overridden or replaced"
    elif policy.casting == "model" and have_hooks(optimizers):
        reason = "an optimizer has step hooks, which see true gradients, in FP32"
    if reason is not None:
        return False, Choice(what="update", value="optimizers' own step", reason=reason)
    return True, Choice(what="update", value=ONE_PASS, reason=choose(device.type)[1])


def prepare(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    policy: Policy,
    device_type: str,
    *,
    one_pass: bool,
) -> NoMasters:
    """Convert ``models`` and ``optimizers`` in place and return the FP32 masters.

    Args:
        models: the models, in FP32; under a policy that casts weights also in its 16-bit format, from which masters then begin.
        optimizers: the optimizers that will update.
        policy: the policy to prepare for.
        device_type: torch's device type of the models.
        one_pass: whether the optimizers read 16-bit gradients themselves.
    """
    for model in models:
        (arguments.refuse_other_half if policy.casting == "model" else arguments.refuse_half)(model, policy)
    if policy.casting == "ops":
        _use_fp8_units(models, policy, device_type)
        for model in models:
            conversion.keep_fp32(model, policy, device_type)
    elif policy.casting == "model":
        parameters = [p for model in models for p in model.parameters()]
        _use_fp8_units(models, policy, device_type)
        masters = masters_for(optimizers, parameters, keep=policy.master_weights, one_pass=one_pass)
        for model in models:
            conversion.cast_model(replicas.bare(model), policy, device_type)
        replicas.rebuild(models)
        masters.begin(optimizers)
        return masters
    elif policy.compute == "tf32":
        set_fp32_products("tf32")
    elif device_type == "cuda":  # fp32: torch computes convolutions and recurrent layers in TF32 unless told otherwise
        set_fp32_products("ieee")
    return NoMasters()


def explained(models: Sequence[nn.Module], casting: Casting) -> list[Choice]:
    """Return how ``casting`` is applied to ``models``, each choice with its reason."""
    spread = dict.fromkeys(str(p.device) for model in models for p in model.parameters())
    where = []
    if len(spread) > 1:
        why = f"the model's parameters are spread over them; casts are {casting.device_type}'s, and what runs elsewhere is not cast"
        where = [Choice(what="devices", value=", ".join(spread), reason=why)]
    return [*where, *fp8_torchao.layer_choices(models, casting.policy, emulated=casting.emulates), casting.choice]


def _use_fp8_units(models: Sequence[nn.Module], policy: Policy, device_type: str) -> None:
    if policy.compute != "fp8" or policy.arithmetic_on(this_device(device_type))[0] != "native":
        return
    if fp8_torchao.convert(models, policy) == 0:
        unconverted = fp8_torchao.layer_choices(models, policy, emulated=False)[1:]
        why = "".join(f"; {choice.value}: {choice.reason}" for choice in unconverted)
        message = f"policy {policy!s} computes no linear layer in FP8 here, and all in {policy.storage.name}{why}"
        checks.warn(message)
