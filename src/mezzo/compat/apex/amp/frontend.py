"""``initialize``, and the state of the loss scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mezzo.compat.apex.amp import levels
from mezzo.compat.apex.amp import models as model_casts
from mezzo.compat.apex.amp import optimizers as amp_optimizers
from mezzo.compat.apex.amp.handle import begin
from mezzo.compat.apex.amp.scaler import LossScaler
from mezzo.compat.apex.amp.state import _amp_state, maybe_print
from mezzo.compat.apex.parallel.LARC import LARC
from mezzo.formats import FP32


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: Any = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Prepare models and optimizers for an optimization level, in place, and return them as they were passed.

    Call it once, after models and optimizers are built and before the models are wrapped for several devices. A keyword that
    is not None overrides what the level says.

    Args:
        models: a module or a list of modules, in FP32.
        optimizers: an optimizer or a list; None for inference.
        enabled: False makes every call of amp do nothing.
        opt_level: ``"O0"``, ``"O1"``, ``"O2"`` or ``"O3"``.
        cast_model_type: format of weights and inputs; False casts nothing.
        patch_torch_functions: whether torch's functions cast their operands.
        keep_batchnorm_fp32: whether batch norms keep FP32 weights; ``"True"`` and ``"False"`` are accepted too.
        master_weights: whether the optimizer updates FP32 copies of 16-bit weights.
        loss_scale: ``"dynamic"``, a number, or a number as text.
        cast_model_outputs: format of what the models return.
        num_losses: how many loss scales there are, one for each ``loss_id``.
        verbosity: 0 prints nothing, 1 the properties and skipped steps, 2 every listed call as well.
        min_loss_scale: floor of dynamic loss scales.
        max_loss_scale: ceiling of dynamic loss scales.

    Raises:
        RuntimeError: the level is unknown, a keyword does not fit it, or a model or optimizer cannot be used.
        TypeError: models or optimizers are neither single nor a list.
        ValueError: a loss scale is not a number.
    """
    _amp_state.verbosity = verbosity
    if not enabled or _amp_state.replaced_by_policy:
        _amp_state.opt_properties = levels.Properties()
        return models if optimizers is None else (models, optimizers)
    if not torch.backends.cudnn.enabled:
        raise RuntimeError("Amp requires torch.backends.cudnn.enabled = True. Leave it on.")
    properties = levels.properties_of(opt_level)
    _report(f"Selected optimization level {levels.BRIEF[opt_level]}", properties)
    overrides = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
    }
    for name, value in overrides.items():
        if value is not None:
            levels.override(properties, name, value)
    _report("After processing overrides, optimization options are:", properties)
    _amp_state.opt_properties = properties
    _amp_state.min_loss_scale, _amp_state.max_loss_scale = min_loss_scale, max_loss_scale
    model_list = _listed(models, nn.Module, "models must be either a single model or a list of models")
    text = "optimizers must be either a single optimizer or a list of optimizers"
    optimizer_list = [] if optimizers is None else _listed(optimizers, (torch.optim.Optimizer, LARC), text)
    _prepare(model_list, optimizer_list, properties, cast_model_outputs)
    _amp_state.loss_scalers = [
        LossScaler(properties.loss_scale, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale)
        for _ in range(num_losses)
    ]
    return models if optimizers is None else (models, optimizers)


def _prepare(
    models: list[Any], optimizers: list[Any], properties: levels.Properties, cast_model_outputs: torch.dtype | None
) -> None:
    model_casts.refuse_wrapped(models)
    if not _amp_state.allow_incoming_model_not_fp32:
        model_casts.refuse_half(models)
    into, device_type = properties.cast_model_type, model_casts.device_type_of(models)
    _amp_state.castings = []
    if into:
        casting = model_casts.emulation_for(into, device_type)
        _amp_state.castings = [] if casting is None else [casting]
        for model in models:
            model_casts.cast_weights(model, into, keep_batchnorm_fp32=bool(properties.keep_batchnorm_fp32))
            model_casts.cast_ends(model, into, cast_model_outputs or FP32.dtype, casting)
            model.register_state_dict_post_hook(model_casts.widen)
        for optimizer in optimizers:
            optimizer.load_state_dict(optimizer.state_dict())  # casts state to the format of the weights
    elif cast_model_outputs is not None:
        for model in models:
            model_casts.cast_ends(model, None, cast_model_outputs, None)
    for optimizer in optimizers:
        amp_optimizers.process(optimizer, keeps_masters=bool(properties.master_weights))
    if properties.patch_torch_functions:
        begin(device_type, verbose=_amp_state.verbosity == 2)


def _listed(value: Any, kind: Any, text: str) -> list[Any]:
    if isinstance(value, kind):
        return [value]
    if not isinstance(value, list):
        raise TypeError(f"{text}. Got {type(value).__name__}: pass one of the two.")
    return value


def _report(title: str, properties: levels.Properties) -> None:
    maybe_print("\n".join([title, *(f"{name:22} : {value}" for name, value in properties.options.items())]), rank0=True)


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the scale and count of every loss scale, under ``loss_scaler0`` and so on.

    Args:
        destination: a dict to write them into and return.
    """
    into = {} if destination is None else destination
    for number, scaler in enumerate(_amp_state.loss_scalers):
        into[f"loss_scaler{number}"] = scaler.state_dict()
    return into


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Load what ``state_dict`` returned, here or in Apex; call ``initialize`` with the same level first.

    A different number of loss scales prints a warning; the scales that both have are loaded.

    Raises:
        RuntimeError: the state contains something else.
    """
    unexpected = [name for name in state_dict if "loss_scaler" not in name]
    scalers = _amp_state.loss_scalers
    saved = [state for name, state in state_dict.items() if name not in unexpected]
    if len(saved) != len(scalers):
        print(f"Warning: state_dict contains {len(saved)} entries, while {len(scalers)} loss_scalers are used")
    for scaler, state in zip(scalers, saved, strict=False):
        scaler.load_state_dict(state)
    if unexpected:
        raise RuntimeError(
            f"Error(s) in loading state_dict. Unexpected key(s): {', '.join(unexpected)}. Allowed: loss_scaler0, loss_scaler1 and "
            "so on. Pass what amp.state_dict() returned."
        )
