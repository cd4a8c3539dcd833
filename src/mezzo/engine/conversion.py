"""Change a model's modules to what a policy keeps: weights in 16 bits, norms and named modules in FP32.

A module's behaviour is changed by giving the instance a ``forward`` of its own, a partial of a function in this file: it
pickles, deep-copies and compiles, and ``del module.forward`` takes it back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from mezzo.errors import PolicyError, nearest
from mezzo.formats import FP32
from mezzo.policy import Policy

_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)
_BATCH_NORMS = (nn.modules.batchnorm._NormBase,)


def is_norm(module: nn.Module) -> bool:
    """Return whether ``module`` normalises: one of torch's layers, or a leaf whose class is called ...Norm (as ``LlamaRMSNorm``)."""
    named = type(module).__name__.lower().endswith("norm") and not any(module.children())
    return isinstance(module, _NORMS) or named


def fp32_modules(model: nn.Module, policy: Policy) -> list[nn.Module]:
    """Return the modules that ``policy`` keeps in FP32 by name.

    Raises:
        PolicyError: a pattern matches no module; the nearest names are offered.
    """
    names = dict(model.named_modules())
    found: dict[nn.Module, None] = {}
    for pattern in policy.fp32_modules:
        matches = [module for name, module in names.items() if name and fnmatchcase(name, pattern)]
        if not matches:
            raise PolicyError(
                f"no module is named {pattern!r}; {nearest(pattern, [n for n in names if n][:200])}",
                hint="patterns match whole names as model.named_modules() gives them, with * and ?",
            )
        found.update(dict.fromkeys(matches))
    return list(found)


def keep_fp32(model: nn.Module, policy: Policy, device_type: str) -> None:
    """Make the modules that ``policy`` names compute in FP32: operands cast, autocast off inside."""
    for module in fp32_modules(model, policy):
        _wrap(module, _in_fp32, device_type)


def cast_model(model: nn.Module, policy: Policy, device_type: str) -> None:
    """Cast a model's weights and buffers in place to the policy's format, and its inputs; outputs become FP32.

    Norms stay in FP32 where the policy says so. BatchNorm takes 16-bit input beside FP32 weights by itself; the other norms get
    their input cast and give back the format that they were given.
    """
    low = policy.storage.dtype
    kept = set(fp32_modules(model, policy))
    keep_fp32(model, policy, device_type)
    norms = [m for m in model.modules() if policy.norms == "fp32" and is_norm(m) and m not in kept]
    stays = {id(t) for m in [*kept, *norms] for t in _state(m)}
    for tensor in _state(model):
        if id(tensor) not in stays and tensor.dtype is FP32.dtype:
            tensor.data = tensor.data.to(low)
    for norm in norms:
        if not isinstance(norm, _BATCH_NORMS):
            _wrap(norm, _norm_in_fp32)
    _wrap(model, _cast_ends, low)


def _state(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _wrap(module: nn.Module, how: Callable[..., Any], *settings: Any) -> None:
    inner = module.__dict__.get("forward")  # an instance's own forward, where another library gave it one
    call = functools.partial(type(module).forward, module) if inner is None else inner
    module.forward = functools.partial(how, call, *settings)


def _in_fp32(call: Callable[..., Any], device_type: str, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(device_type, enabled=False):
        return call(*to_format(args, FP32.dtype), **to_format(kwargs, FP32.dtype))


def _norm_in_fp32(call: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return to_format(call(x.float(), *args, **kwargs), x.dtype)


def _cast_ends(call: Callable[..., Any], low: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    return to_format(call(*to_format(args, low), **to_format(kwargs, low)), FP32.dtype)


def to_format(values: Any, dtype: torch.dtype) -> Any:
    """Return ``values`` with every FP32 or 16-bit tensor in it cast to ``dtype``; integers and FP64 stay."""

    def cast(tensor: Tensor) -> Tensor:
        castable = tensor.is_floating_point() and tensor.element_size() in (2, 4)
        return tensor.to(dtype) if castable else tensor

    return tree_map_only(Tensor, cast, values)
