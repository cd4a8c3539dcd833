"""A user's own functions in O1's lists: registered by module and name before ``initialize``, or decorated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from mezzo.compat.apex.amp.state import _amp_state
from mezzo.launch.patches import Patches
from mezzo.oplists import Precision

if TYPE_CHECKING:
    from mezzo.compat.apex.amp.casts import PatchedFunctions

F = TypeVar("F", bound=Callable[..., Any])

_registered: dict[tuple[int, str], tuple[Any, str, Precision]] = {}


def half_function(fn: F) -> F:
    """Decorate a function so that it receives FP16 operands under O1."""
    return _decorated(fn, "lower")


def float_function(fn: F) -> F:
    """Decorate a function so that it receives FP32 operands under O1."""
    return _decorated(fn, "fp32")


def promote_function(fn: F) -> F:
    """Decorate a function so that it receives operands in the widest format among them under O1."""
    return _decorated(fn, "widest")


def register_half_function(module: Any, name: str) -> None:
    """Let ``module.name`` receive FP16 operands under O1; call it before ``initialize``.

    Raises:
        ValueError: the module has no such function.
    """
    _register(module, name, "lower")


def register_float_function(module: Any, name: str) -> None:
    """Let ``module.name`` receive FP32 operands under O1; call it before ``initialize``.

    Raises:
        ValueError: the module has no such function.
    """
    _register(module, name, "fp32")


def register_promote_function(module: Any, name: str) -> None:
    """Let ``module.name`` receive operands in the widest format among them under O1; call it before ``initialize``.

    Raises:
        ValueError: the module has no such function.
    """
    _register(module, name, "widest")


def install(mode: PatchedFunctions, patches: Patches) -> None:
    """Replace the registered functions until ``patches`` are undone; a torch function leaves the list that it is in."""
    for module, name, precision in _registered.values():
        mode.prefer(getattr(module, name), precision)
        patches.wrap(module, name, functools.partial(_decorated, precision=precision))


def _register(module: Any, name: str, precision: Precision) -> None:
    if not hasattr(module, name):
        raise ValueError(
            f"No function named {name} in {module}. Pass a module or class, and the name of a function in it."
        )
    _registered[id(module), name] = (module, name, precision)


def _decorated(function: F, precision: Precision) -> F:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        handle = _amp_state.handle
        if handle is None or not handle.is_active():
            return function(*args, **kwargs)
        return handle.mode.call(function, precision, args, kwargs)

    return call  # type: ignore[return-value]
