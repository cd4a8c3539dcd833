"""What a script passes to torch's backward passes, in any form that torch accepts, and torch's functions behind their checks."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mezzo.engine.gradients import ACCUMULATES


def reusable(values: Any) -> Any:
    """Return ``values``, as a list if they are an iterator or a view, such as ``model.parameters()`` and ``weights.values()``."""
    to_copy = isinstance(values, Iterable) and not isinstance(values, (Tensor, list, tuple, Mapping))
    return list(values) if to_copy else values


def listed(values: Any) -> list[Any]:
    """Return a result of ``reusable`` as a list: of a mapping, its values."""
    if isinstance(values, Mapping):
        return list(values.values())
    return list(values) if isinstance(values, (list, tuple)) else [values]


def given_gradients(outputs: Sequence[Tensor], given: Any) -> list[Any]:
    """Return the gradient that was passed for each output, None for outputs without one."""
    return [None] * len(outputs) if given is None else listed(given)


def weighted(loss: Tensor, gradient: Any) -> Tensor:
    """Return a loss times the gradient that its backward pass starts from, such as the -1 of a WGAN's critic."""
    if not isinstance(gradient, Tensor) or gradient.numel() != 1:
        return loss
    return loss.detach() * gradient.detach()


def leaves_of(outputs: Iterable[Tensor], *, max_nodes: float = math.inf) -> list[Tensor]:
    """Return the leaves that a backward pass from ``outputs`` reaches; none if its graph has more than ``max_nodes`` nodes."""
    listed_outputs = list(outputs)
    leaves = [t for t in listed_outputs if t.grad_fn is None and t.requires_grad]
    waiting = [t.grad_fn for t in listed_outputs if t.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node: Any = waiting.pop()
        if type(node) is ACCUMULATES:
            leaves.append(node.variable)
            continue
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
        if len(seen) > max_nodes:
            return []
    return leaves


# ``torch.autograd.backward``, ``Tensor.register_hook`` and others check whether a function mode is on
# (``torch.set_default_device`` sets one), pass themselves to it by the name in their module, and run with the mode off.
# If that name leads to a replacement of ours, the replacement would be called twice. A twin has the same code, but its
# check never finds a mode.

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
