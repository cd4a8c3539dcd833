"""Convert a model's modules to a policy's formats: weights to 16 bits, norms and named modules to FP32.

A converted module instance has its own ``forward``, a partial of a module-level function. It has the signature of the forward that it
replaces, from which other libraries read a model's inputs. It pickles, deep-copies and compiles, and ``del module.forward`` removes it.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Container, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from mezzo.errors import PolicyError, nearest
from mezzo.formats import BF16, FP16, FP32
from mezzo.policy import Policy

HALF = (FP16.dtype, BF16.dtype)
"""The 16-bit dtypes of training."""
_FP32 = FP32.dtype
_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)
_BATCH_NORMS = (nn.modules.batchnorm._NormBase,)
_ONE_OPERATION = (*_BATCH_NORMS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_MAX_NAMED = 3
"""The most modules with 16-bit weights that a message names."""


def is_norm(module: nn.Module) -> bool:
    """Return whether ``module`` is a norm: one of torch's, or a leaf whose class is named ...Norm (such as ``LlamaRMSNorm``)."""
    named = type(module).__name__.lower().endswith("norm") and not any(module.children())
    return isinstance(module, _NORMS) or named


def fp32_modules(model: nn.Module, policy: Policy) -> list[nn.Module]:
    """Return the modules that ``policy`` keeps in FP32 by name.

    Raises:
        PolicyError: a pattern matches no module; the nearest names are suggested.
    """
    matched = matching_patterns(model, policy.fp32_modules)
    for pattern in policy.fp32_modules:
        if pattern not in matched:
            raise no_such_module(pattern, module_names(model))
    named = module_names(model).items()
    return [module for name, module in named if any(fnmatchcase(name, p) for p in policy.fp32_modules)]


def where_16_bits(model: nn.Module, *, leave_out: Container[Tensor] = ()) -> str:
    """Return which weights of ``model`` are in 16 bits: its class if all are, else the modules, and their share of the weights.

    Args:
        model: the model.
        leave_out: weights that do not count.
    """
    floating = {n: p for n, p in model.named_parameters() if p.is_floating_point() and p not in leave_out}
    narrow = {name: p for name, p in floating.items() if p.dtype.itemsize == 2}
    kind = type(model).__name__
    if len(narrow) == len(floating):
        return kind
    share = sum(p.numel() for p in narrow.values()) / max(1, sum(p.numel() for p in floating.values()))
    names = list(dict.fromkeys(name.rpartition(".")[0] or name for name in narrow))
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"{', '.join(names[:_MAX_NAMED])}{more} in {kind} ({share:.0%} of its weights)"


def matching_patterns(model: nn.Module, patterns: Iterable[str]) -> set[str]:
    """Return the ``patterns`` that match a module's name."""
    names = module_names(model)
    return {pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)}


def module_names(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules inside ``model`` by name, without the prefixes of torch.compile and DistributedDataParallel."""
    names = {name: module for name, module in model.named_modules() if name}
    return {re.sub(r"^((_orig_mod|module)\.)+", "", name): module for name, module in names.items()}


def no_such_module(pattern: str, names: Iterable[str]) -> PolicyError:
    """Return the error for a pattern that matches none of ``names``."""
    return PolicyError(
        f"no module is named {pattern!r}; {nearest(pattern, list(names)[:100])}",
        hint="patterns match whole names as model.named_modules() gives them, with * and ?",
    )


def keep_fp32(model: nn.Module, policy: Policy, device_type: str) -> None:
    """Make the modules that ``policy`` names compute in FP32: operands cast, autocast off inside."""
    for module in fp32_modules(model, policy):
        wrap(module, in_fp32, device_type)


def keep_own_norms(model: nn.Module, policy: Policy, device_type: str) -> None:
    """Make norms that are not written with torch's (such as ``LlamaRMSNorm``) compute in FP32 and return the format of their first input.

    For op lists that lower what such a norm is made of; torch's own norms are one operation each, which the lists keep in FP32.
    """
    kept = set(fp32_modules(model, policy))
    for module in model.modules():
        if is_norm(module) and not isinstance(module, _ONE_OPERATION) and module not in kept:
            wrap(module, _norm_outside_regions, device_type)


def cast_model(model: nn.Module, policy: Policy, device_type: str) -> None:
    """Cast a model's weights and buffers in place to the policy's format, and its inputs; outputs become FP32.

    Norms stay in FP32 if the policy says so. BatchNorm accepts 16-bit inputs with FP32 weights; the inputs of other norms
    are cast, and their outputs are cast back. Modules that the policy names return FP32, since their outputs may exceed the
    range of 16 bits; modules with 16-bit weights after them cast their own inputs.
    """
    low = policy.storage.dtype
    kept = set(fp32_modules(model, policy))
    keep_fp32(model, policy, device_type)
    norms = [m for m in model.modules() if policy.norms == "fp32" and is_norm(m) and m not in kept]
    stays = {id(t) for m in [*kept, *norms] for t in _state(m)}
    for tensor in _state(model):
        if id(tensor) not in stays and tensor.dtype is FP32.dtype:
            tensor.data = tensor.data.to(low)
    for module in model.modules() if kept else ():
        if any(p.dtype is low for p in module.parameters(recurse=False)):
            wrap(module, _cast_inputs, low)
    for norm in norms:
        if not isinstance(norm, _BATCH_NORMS):
            wrap(norm, _norm_in_fp32)
    wrap(model, cast_ends, low)


def _state(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


class OwnForward:
    """The forward method of a module's class, which is copied and pickled with the module.

    A bound method would pickle as the module's attribute ``forward``, which is the forward that calls this one. The plain function may
    have a name, left by a decorator, that pickle cannot find.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the class's forward."""
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        whole = inspect.signature(type(self.module).forward)
        return whole.replace(parameters=list(whole.parameters.values())[1:])


def wrap(module: nn.Module, wrapper: Callable[..., Any], *settings: Any) -> None:
    """Make calls of ``module`` run ``wrapper(call, *settings, *args, **kwargs)``; ``call`` is the module's previous forward."""
    inner = module.__dict__.get("forward")  # an instance's own forward, if another library has set one
    call = OwnForward(module) if inner is None else inner
    forward = functools.partial(wrapper, call, *settings)
    functools.update_wrapper(forward, type(module).forward, updated=())
    forward.__wrapped__ = call  # type: ignore[attr-defined]
    module.forward = forward


def wrapped_by(module: nn.Module, wrapper: Callable[..., Any]) -> functools.partial[Any] | None:
    """Return the forward that ``wrap(module, wrapper, ...)`` set; None if ``module`` has another."""
    forward = module.__dict__.get("forward")
    return forward if isinstance(forward, functools.partial) and forward.func is wrapper else None


def unwrap(module: nn.Module, wrapper: Callable[..., Any]) -> None:
    """Undo ``wrap(module, wrapper, ...)``, if that was the last wrap."""
    forward = wrapped_by(module, wrapper)
    if forward is None:
        return
    if isinstance(forward.args[0], OwnForward):
        del module.forward
    else:
        module.forward = forward.args[0]


def in_fp32(call: Callable[..., Any], device_type: str, *args: Any, **kwargs: Any) -> Any:
    """Run ``call`` with autocast off and every 16-bit argument in FP32."""
    with torch.autocast(device_type, enabled=False):
        return call(*to_format(args, FP32.dtype), **to_format(kwargs, FP32.dtype))


def _norm_in_fp32(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = (v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.is_floating_point())
    x = next(given, None)
    result = call(*to_format(args, FP32.dtype), **to_format(kwargs, FP32.dtype))
    return result if x is None else to_format(result, x.dtype)


def _norm_outside_regions(call: Callable[..., Any], device_type: str, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(device_type, enabled=False):
        return _norm_in_fp32(call, *args, **kwargs)


def _cast_inputs(call: Callable[..., Any], low: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    return call(*to_format(args, low), **to_format(kwargs, low))


def cast_ends(call: Callable[..., Any], low: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    """Run ``call`` with its arguments cast to ``low``, and return its outputs in FP32."""
    return to_format(call(*to_format(args, low), **to_format(kwargs, low)), FP32.dtype)


def to_format(values: Any, dtype: torch.dtype) -> Any:
    """Return ``values`` with every FP32 or 16-bit tensor in it cast to ``dtype``; integers and FP64 stay."""
    if type(values) is Tensor:  # ``cast`` inlined: every step ends here
        current = values.dtype
        if current is dtype or not (current is _FP32 or current in HALF):
            return values
        return values.float() if dtype is _FP32 else values.to(dtype)  # float() is a quarter cheaper

    def cast(tensor: Tensor) -> Tensor:
        castable = tensor.is_floating_point() and tensor.element_size() in (2, 4)
        return tensor.to(dtype) if castable else tensor

    if isinstance(values, Tensor):
        return cast(values)
    if type(values) is tuple and len(values) == 1 and isinstance(values[0], Tensor):  # a module's usual arguments
        return (cast(values[0]),)
    if (
        type(values) in (dict, tuple) and not values
    ):  # most calls have no keyword arguments; an array has no truth value
        return values
    return tree_map_only(Tensor, cast, values)
