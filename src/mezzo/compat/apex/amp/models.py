"""Models under a level: which ones ``initialize`` refuses, casts of weights and inputs, FP32 state dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mezzo.compat.apex.amp.state import warn_or_err
from mezzo.compat.regions import ModelRegion
from mezzo.engine.casts.casting import Casting
from mezzo.engine.casts.conversion import wrap
from mezzo.engine.casts.half import HALF
from mezzo.formats import BF16, FP16, FP32
from mezzo.policy import Policy

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
