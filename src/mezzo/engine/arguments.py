"""Make a session's arguments ready to train: refuse what cannot be trained together, convert the rest to the policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from mezzo.devices import this_device
from mezzo.engine import session_errors
from mezzo.engine.casts import conversion
from mezzo.engine.casts.casting import Casting
from mezzo.engine.gradients import parameters_of, trained_by
from mezzo.engine.matrix_units import low_layers
from mezzo.engine.matrix_units.native_units import set_fp32_products
from mezzo.engine.optimizers.master_weights import NoMasters, masters_for
from mezzo.engine.optimizers.one_pass import OnePass, choose, have_hooks, step_is_own, without_kernel
from mezzo.engine.processes import shards
from mezzo.engine.session_errors import warn
from mezzo.errors import SessionError
from mezzo.explain import Choice
from mezzo.formats import FP16, FP32, FP64
from mezzo.policy import Policy

Optimizers = Sequence[torch.optim.Optimizer]


def check_counts(**counts: Any) -> None:
    """Refuse counts that are not whole numbers of 1 or more."""
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise SessionError(
                f"{name}={count!r}; allowed: a whole number of 1 or more",
                hint=f"leave {name} out for the default, 1",
            )


def check_limits(**limits: Any) -> None:
    """Refuse limits that are neither None nor numbers above 0."""
    for name, limit in limits.items():
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0):
            raise SessionError(
                f"{name}={limit!r}; allowed: a number above 0, or None",
                hint=f"leave {name} out to train without clipping",
            )


def check_parts(
    models: Sequence[nn.Module], optimizers: Optimizers, schedulers: Sequence[Any], policy: Policy
) -> torch.device:
    """Refuse models, optimizers and schedulers that cannot be trained together under ``policy``; return the models' device."""
    check_kinds(models, optimizers, schedulers)
    check_optimizers(optimizers, schedulers)
    parameters = parameters_of(models)
    refuse_untrainable(parameters)
    device = device_of(parameters)
    check_trained(optimizers, parameters)
    refuse_lost_eps(optimizers, policy)
    warn_of_fp64(parameters, policy)
    return device


def refuse_untrainable(parameters: Sequence[nn.Parameter]) -> None:
    """Refuse parameters without memory, and those and sessions that are made for inference: torch records no gradients for them."""
    if torch.is_inference_mode_enabled() or any(p.is_inference() for p in parameters):
        raise SessionError(
            "the model or the session was built under torch.inference_mode(); allowed: outside it",
            hint="build model, optimizer and session without it, and evaluate under it",
        )
    if any(p.is_meta for p in parameters):
        raise SessionError(
            "the model has parameters on the meta device, which have no values; allowed: any other device",
            hint="call model.to_empty(device=...) and initialise it, or load its weights, before the optimizer is built",
        )


def check_attribute(session: object, name: str, value: Any, *, settable: Sequence[str]) -> None:
    """Refuse a new value of a session's public attribute, unless later windows follow it."""
    if name not in settable:
        what = "is read-only" if hasattr(session, name) else "does not exist"
        raise SessionError(
            f"session.{name} {what}; may be set: {', '.join(settable)}",
            hint="build a new session with the other settings",
        )
    if name == "accumulate":
        check_counts(accumulate=value)
    if name == "clip_norm":
        check_limits(clip_norm=value)


def check_kinds(models: Sequence[Any], optimizers: Sequence[Any], schedulers: Sequence[Any]) -> None:
    """Refuse values that are not modules, optimizers or schedulers."""
    for model in models:
        if not isinstance(model, nn.Module):
            swapped = isinstance(model, torch.optim.Optimizer)
            raise SessionError(
                f"model is {_kind_of(model)}; allowed: a torch.nn.Module, or several",
                hint="write Session(model, optimizer)"
                if swapped
                else "pass the module whose output the loss is computed from",
            )
    if not optimizers:
        raise SessionError(
            "optimizer is an empty list; allowed: a torch optimizer, or several",
            hint="build one: torch.optim.AdamW(model.parameters(), lr=1e-3)",
        )
    for optimizer in optimizers:
        if isinstance(optimizer, type) or not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "step")):
            got = "the model's parameters" if isinstance(optimizer, torch.Tensor) else _kind_of(optimizer)
            raise SessionError(
                f"optimizer is {got}; allowed: a torch optimizer, or several",
                hint="build one: torch.optim.AdamW(model.parameters(), lr=1e-3)",
            )
    for scheduler in schedulers:
        if isinstance(scheduler, type) or not callable(getattr(scheduler, "step", None)):
            raise SessionError(
                f"scheduler is {_kind_of(scheduler)}; allowed: a learning rate scheduler, or several",
                hint="build one: torch.optim.lr_scheduler.LambdaLR(optimizer, factor_of_update)",
            )


def _kind_of(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "None" if value is None else f"of type {type(value).__name__}"


def check_optimizers(optimizers: Optimizers, schedulers: Iterable[Any]) -> None:
    """Refuse optimizers with closures, a parameter in two optimizers, and schedulers that need a metric or another optimizer."""
    seen: dict[nn.Parameter, int] = {}
    for number, optimizer in enumerate(optimizers):
        if isinstance(optimizer, torch.optim.LBFGS):
            raise SessionError(
                "LBFGS evaluates the loss several times per update through a closure; a session has one backward pass",
                hint="train with LBFGS in FP32, or run the script under mezzo run, which handles closures",
            )
        for parameter in trained_by([optimizer]):
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
        scheduled = getattr(scheduler, "optimizer", None)
        if scheduled is not None and not any(scheduled is optimizer for optimizer in optimizers):
            raise SessionError(
                f"scheduler {type(scheduler).__name__} belongs to another {type(scheduled).__name__} than the session's",
                hint="build the scheduler from the optimizer that you pass to the session; this one would never be stepped",
            )


def check_trained(optimizers: Optimizers, parameters: Sequence[nn.Parameter]) -> None:
    """Refuse an optimizer without parameters of the models, and warn if the model changed after it was built."""
    trained, in_models = set(trained_by(optimizers)), set(parameters)
    for optimizer in optimizers:
        its_parameters = trained_by([optimizer])
        if its_parameters and in_models.isdisjoint(its_parameters):
            raise SessionError(
                f"{type(optimizer).__name__} has {len(its_parameters)} parameters, none of which is the model's",
                hint="build the optimizer from the parameters of the model that you pass to the session, after the model was copied "
                "or sharded; pass several models as a list",
            )
    untrained = [p for p in parameters if p.requires_grad and p not in trained]
    stale = trained - in_models
    if untrained and stale and {p.shape for p in untrained} & {p.shape for p in stale}:
        warn(
            f"{len(untrained)} parameters of the model are in no optimizer, and {len(stale)} of the optimizers' are not in the model: "
            "layers were replaced after the optimizer was built; build it afterwards",
        )


def device_of(parameters: Sequence[nn.Parameter]) -> torch.device:
    """Return the device of the first parameter that is not on the CPU, else the CPU.

    A model may be spread over several devices, or keep a large embedding on the CPU; casts are chosen for the device that computes.

    Raises:
        SessionError: the model has no parameters, or keeps them on the CPU and computes elsewhere (FSDP2's ``CPUOffloadPolicy``).
    """
    if not parameters:
        raise SessionError(
            "the model has no parameters; allowed: a module, or several, with at least one",
            hint="pass the module whose parameters the optimizer has",
        )
    for parameter in parameters:
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None and mesh.device_type != parameter.device.type:
            raise SessionError(
                f"a parameter of shape {tuple(parameter.shape)} is stored on {parameter.device.type} but computed with on "
                f"{mesh.device_type}, so norms and casts would be wrong; allowed: sharded parameters on their mesh's device",
                hint="leave offload_policy out of fully_shard, or save optimizer memory with mezzo.AdamW(..., moments='8bit')",
            )
    devices = dict.fromkeys(p.device for p in parameters)
    return next((device for device in devices if device.type != "cpu"), parameters[0].device)


def refuse_half(model: nn.Module, policy: Policy) -> None:
    """Refuse 16-bit weights under a policy that keeps weights in FP32."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype not in (FP32.dtype, FP64.dtype):
            raise SessionError(
                f"parameter {name!r} is {parameter.dtype}, and policy {policy!s} keeps weights in FP32",
                hint="leave the model in FP32; policies ending in -master and -pure cast it themselves",
            )


def refuse_other_half(model: nn.Module, policy: Policy) -> None:
    """Refuse 16-bit weights in a format other than the policy's."""
    low = policy.storage.dtype
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.element_size() < 4 and parameter.dtype is not low:
            raise SessionError(
                f"parameter {name!r} is {parameter.dtype}, and policy {policy!s} casts weights from FP32 to {low}",
                hint="call model.float() before the optimizer is built, or choose the policy of the model's format",
            )


def refuse_lost_eps(optimizers: Optimizers, policy: Policy) -> None:
    """Refuse an optimizer whose ``eps`` rounds to 0 in the 16-bit format of its state: it would divide 0 by 0."""
    pure = policy.casting == "model" and not policy.master_weights and policy.storage is FP16
    for optimizer in optimizers if pure else ():
        if isinstance(optimizer, OnePass):  # computes in FP32, and keeps its state in it
            continue
        for eps in (group.get("eps") for group in optimizer.param_groups):
            if isinstance(eps, float) and torch.tensor(eps, dtype=FP16.dtype) == 0:
                raise SessionError(
                    f"{type(optimizer).__name__} keeps its state in {FP16.dtype} under policy {policy!s}, and eps={eps:g} is 0 "
                    "there: where a squared gradient underflows, 0 is divided by 0 and the weights become NaN",
                    hint="use mezzo.AdamW, whose moments are FP32, or policy fp16-master; or pass eps=1e-4",
                )


def warn_of_fp64(parameters: Sequence[nn.Parameter], policy: Policy) -> None:
    """Warn of an FP64 model under a policy that lowers precision: none of it is cast."""
    floating = [p for p in parameters if p.is_floating_point()]
    if policy.lowers and floating and all(p.dtype is FP64.dtype for p in floating):
        warn(
            f"the model is in {FP64.dtype}, which no policy casts: policy {policy!s} changes nothing; call model.float() before "
            "the optimizer is built",
        )


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
        reason = "not all optimizers are Mezzo's own"
    elif not all(step_is_own(o) for o in optimizers):
        reason = "an optimizer's step was overridden or replaced"
    elif policy.casting == "model" and have_hooks(optimizers):
        reason = "an optimizer has step hooks, which see true gradients, in FP32"
    if reason is not None:
        return False, Choice(what="update", value="optimizers' own step", reason=reason)
    formula = without_kernel(optimizers, device.type)
    why = f"plain torch operations: {formula} has no kernel for {device.type}" if formula else choose(device.type)[1]
    return True, Choice(what="update", value=ONE_PASS, reason=why)


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
    low_layers.release(models)
    for model in models:
        (refuse_other_half if policy.casting == "model" else refuse_half)(model, policy)
    if policy.casting == "ops":
        _use_low_layers(models, policy, device_type)
        for model in models:
            conversion.keep_fp32(model, policy, device_type)
    elif policy.casting == "model":
        parameters = [p for model in models for p in model.parameters()]
        _use_low_layers(models, policy, device_type)
        masters = masters_for(optimizers, parameters, keep=policy.master_weights, one_pass=one_pass)
        for model in models:
            conversion.cast_model(shards.bare(model), policy, device_type)
        shards.rebuild(models)
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
    return [*where, *low_layers.layer_choices(models, casting.policy, emulated=casting.emulates), casting.choice]


def _use_low_layers(models: Sequence[nn.Module], policy: Policy, device_type: str) -> None:
    emulated = policy.arithmetic_on(this_device(device_type))[0] != "native"
    num_converted, left_alone = low_layers.convert(models, policy, emulated=emulated) or (None, [])
    if num_converted == 0:
        why = "".join(f"; {choice.value}: {choice.reason}" for choice in left_alone)
        message = f"policy {policy!s} computes no linear layer in {policy.compute.upper()} here, and all in {policy.storage.name}{why}"
        session_errors.warn(message)
