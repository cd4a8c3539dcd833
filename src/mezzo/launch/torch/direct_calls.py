"""Torch's own Python functions without their check for function modes.

``torch.autograd.backward``, ``Tensor.register_hook`` and others check whether a function mode is on
(``torch.set_default_device`` sets one), pass themselves to it by the name in their module, and run with the mode off.
If that name leads to a replacement of ours, the replacement would be called twice. A twin has the same code, but its
check never finds a mode.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

Function: TypeAlias = Callable[..., Any]

_LOOKUPS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _never(*args: object) -> bool:
    return False


def _twin(function: types.FunctionType, never: Function = _never) -> Function:
    scope = {**function.__globals__, **dict.fromkeys(_LOOKUPS, never)}
    twin = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _python_functions() -> dict[Function, Function]:
    # Not those of torch.functional: torch.compile traces none of their twins.
    scopes = [vars(torch.nn.functional), vars(Tensor)]
    functions: list[Any] = [f for scope in scopes for f in scope.values() if isinstance(f, types.FunctionType)]
    backward: Any = torch.autograd.backward
    functions += [torch.autograd.grad]
    checked = [f for f in functions if set(_LOOKUPS) & set(f.__code__.co_names)]
    twins = {f: _twin(f) for f in checked if f is not Tensor.unflatten}
    # ().count returns 0 for any argument, like ``_never``, but without a Python frame in every step of a script.
    return twins | {backward: _twin(backward, never=().count)}


WITHOUT_MODE_CHECK = _python_functions()
"""The twin of each of torch's functions that checks for a mode."""
