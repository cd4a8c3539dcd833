"""The casts of O1, with a user's own functions: ``initialize`` turns them on, and ``_amp_state.handle`` turns them off."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from mezzo.compat.apex.amp import casts
from mezzo.compat.apex.amp.state import _amp_state
from mezzo.launch.patches import Patches
from mezzo.oplists import Precision

if TYPE_CHECKING:
    from mezzo.compat.apex.amp.casts import PatchedFunctions


class AmpHandle:
    """The casts of O1 on one kind of device, from construction to ``_deactivate``."""

    def __init__(self, device_type: str, *, verbose: bool) -> None:
        self.mode = casts.PatchedFunctions(device_type, verbose=verbose)
        self._ended = False
        self._patches = Patches()
        casts.begin(self.mode)
        install(self.mode, self._patches)

    def is_active(self) -> bool:
        """Return whether functions are cast at the moment."""
        return not self._ended and torch.is_autocast_enabled(self.mode.device_type)

    def _deactivate(self) -> None:
        """End the casts for good; Apex's name, which notebooks and test suites call between two models."""
        self._ended = True
        self.mode.clear()
        casts.end(self.mode)
        self._patches.undo()


def begin(device_type: str, *, verbose: bool = False) -> AmpHandle:
    """Begin the casts of O1, in place of earlier ones, and return their handle.

    Args:
        device_type: whose tensors are cast.
        verbose: whether every listed call is printed.
    """
    if _amp_state.handle is not None:
        _amp_state.handle._deactivate()
    handle = _amp_state.handle = AmpHandle(device_type, verbose=verbose)
    return handle


def disable_casts() -> AbstractContextManager[Any]:
    """Return a context in which torch's functions cast nothing."""
    handle = _amp_state.handle
    return nullcontext() if handle is None else torch.autocast(handle.mode.device_type, enabled=False)


def clear_cache() -> None:
    """Drop the casts of weights that O1 keeps."""
    if _amp_state.handle is not None:
        _amp_state.handle.mode.clear()


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
