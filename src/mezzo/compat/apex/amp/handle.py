"""The casts of O1: ``initialize`` turns them on, and ``_amp_state.handle`` turns them off."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from mezzo.compat.apex.amp import casts, registry
from mezzo.compat.apex.amp.state import _amp_state
from mezzo.launch.patches import Patches


class AmpHandle:
    """The casts of O1 on one kind of device, from construction to ``_deactivate``."""

    def __init__(self, device_type: str, *, verbose: bool) -> None:
        self.mode = casts.PatchedFunctions(device_type, verbose=verbose)
        self._ended = False
        self._patches = Patches()
        casts.begin(self.mode)
        registry.install(self.mode, self._patches)

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
