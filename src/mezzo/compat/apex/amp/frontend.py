"""``initialize``, and the state of the loss scales."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mezzo.compat.apex.amp import optimizers as amp_optimizers
from mezzo.compat.apex.amp.handle import begin
from mezzo.compat.apex.amp.state import (
    BRIEF,
    LossScaler,
    Properties,
    _amp_state,
    maybe_print,
    override,
    properties_of,
    warn_or_err,
)
from mezzo.compat.apex.parallel.LARC import LARC
from mezzo.compat.driven import ModelRegion
from mezzo.engine.casts.casting import Casting
from mezzo.engine.casts.conversion import HALF, wrap
from mezzo.formats import BF16, FP16, FP32
from mezzo.policy import Policy


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
        _amp_state.opt_properties = Properties()
        return models if optimizers is None else (models, optimizers)
    if not torch.backends.cudnn.enabled:
        raise RuntimeError("Amp requires torch.backends.cudnn.enabled = True. Leave it on.")
    properties = properties_of(opt_level)
    _report(f"Selected optimization level {BRIEF[opt_level]}", properties)
    overrides = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
    }
    for name, value in overrides.items():
        if value is not None:
            override(properties, name, value)
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
    models: list[Any], optimizers: list[Any], properties: Properties, cast_model_outputs: torch.dtype | None
) -> None:
    refuse_wrapped(models)
    if not _amp_state.allow_incoming_model_not_fp32:
        refuse_half(models)
    into, device_type = properties.cast_model_type, device_type_of(models)
    _amp_state.castings = []
    if into:
        casting = emulation_for(into, device_type)
        _amp_state.castings = [] if casting is None else [casting]
        for model in models:
            cast_weights(model, into, keep_batchnorm_fp32=bool(properties.keep_batchnorm_fp32))
            cast_ends(model, into, cast_model_outputs or FP32.dtype, casting)
            model.register_state_dict_post_hook(widen)
        for optimizer in optimizers:
            optimizer.load_state_dict(optimizer.state_dict())  # casts state to the format of the weights
    elif cast_model_outputs is not None:
        for model in models:
            cast_ends(model, None, cast_model_outputs, None)
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


def _report(title: str, properties: Properties) -> None:
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


_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.parallel.DataParallel)


def refuse_wrapped(models: Iterable[nn.Module]) -> None:
    """Refuse models inside a parallel wrapper.

    Raises:
        RuntimeError: a model is one.
    """
    for model in models:
        if isinstance(model, _WRAPPERS):
            kind = f"{type(model).__module__}.{type(model).__qualname__}"
            raise RuntimeError(
                f"Incoming model is an instance of {kind}. Pass the bare model, and wrap the one that "
                "amp.initialize returns."
            )


def refuse_half(models: Iterable[nn.Module]) -> None:
    """Refuse models whose weights are in 16 bits already (a printed warning under ``hard_override``).

    Raises:
        RuntimeError: a parameter or a buffer is.
    """
    for model in models:
        for kind, named in (("param", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, tensor in named:
                if tensor.dtype in HALF:
                    warn_or_err(
                        f"Found {kind} {name} with type {tensor.type()}, expected FP32. Do not call .half() on a model before "
                        "amp.initialize: every optimization level casts what it needs to."
                    )


def cast_weights(model: nn.Module, dtype: torch.dtype, *, keep_batchnorm_fp32: bool) -> None:
    """Cast a model's floating-point parameters and buffers in place, except batch norms with weights under ``keep_batchnorm_fp32``."""
    for module in model.modules():
        if keep_batchnorm_fp32 and isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
            continue
        module._apply(lambda t: t.to(dtype) if t.is_floating_point() else t, recurse=False)


def cast_ends(model: nn.Module, into: torch.dtype | None, out: torch.dtype, casting: Casting | None) -> None:
    """Cast a model's inputs to ``into`` and its outputs to ``out``; run it under ``casting``."""
    wrap(model, _cast_around, model, into, out, None if casting is None else ModelRegion(casting.policy, casting))


def _cast_around(
    call: Callable[..., Any],
    model: nn.Module,
    into: torch.dtype | None,
    out: torch.dtype,
    region: ModelRegion | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if into is not None:
        args, kwargs = cast_values(args, into), cast_values(kwargs, into)
    with nullcontext() if region is None else region(model):
        output = call(*args, **kwargs)
    return cast_values(output, out)


def cast_values(values: Any, dtype: torch.dtype) -> Any:
    """Return ``values`` with every floating-point tensor in it cast to ``dtype``.

    A batch of a user's class is cast by its own ``to``; texts, numbers and arrays stay.
    """
    if isinstance(values, Tensor):
        return values.to(dtype) if values.is_floating_point() else values
    if isinstance(values, (str, bytes, np.ndarray)):
        return values
    if hasattr(values, "to"):
        return values.to(dtype)
    if isinstance(values, Mapping):
        cast = {key: cast_values(value, dtype) for key, value in values.items()}
        return cast if type(values) is dict else _rebuilt(values, cast)
    if isinstance(values, tuple) and hasattr(values, "_fields"):
        return type(values)(*(cast_values(value, dtype) for value in values))
    if isinstance(values, (list, tuple, set, frozenset)):
        return type(values)([cast_values(value, dtype) for value in values])
    return values


def _rebuilt(values: Mapping[Any, Any], cast: dict[Any, Any]) -> Any:
    """Return a mapping of the type of ``values`` if its constructor accepts one, as transformers' outputs do; else a dict."""
    try:
        return type(values)(cast)  # type: ignore[call-arg]
    except TypeError:
        return cast


def widen(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Put FP32 copies of 16-bit weights into a state dict, as its hook, so that a checkpoint loads under every level."""
    for name, value in state.items():
        if name.startswith(prefix) and isinstance(value, Tensor) and value.dtype in HALF:
            state[name] = value.to(FP32.dtype)


def emulation_for(dtype: torch.dtype, device_type: str) -> Casting | None:
    """Return how 16-bit arithmetic is emulated, None if the device has it natively."""
    names = {FP16.dtype: "fp16-pure", BF16.dtype: "bf16-pure"}
    if dtype not in names:
        return None
    casting = Casting.of(Policy.parse(names[dtype]), device_type)
    return casting if casting.emulates else None


def device_type_of(models: Iterable[nn.Module]) -> str:
    """Return torch's device type of the first parameter; CUDA where there is none and the machine has it, else CPU."""
    first = next((p for model in models for p in model.parameters()), None)
    if first is not None:
        return first.device.type
    return "cuda" if torch.cuda.is_available() else "cpu"
