"""The handle of the casts of O1: begun by ``init``, which ``initialize`` calls; ended by ``_deactivate``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from mezzo.compat.apex.amp import casts, registry
from mezzo.compat.apex.amp.state import _amp_state
from mezzo.compat.apex.amp.wrapped import OptimWrapper
from mezzo.launch.patches import Patches


class AmpHandle:
    """Keep the casts on, off for a while, or end them."""

    def __init__(self, mode: casts.PatchedFunctions) -> None:
        self._mode = mode
        self._patches = Patches()
        casts.begin(mode)
        registry.install(self, self._patches)

    @property
    def mode(self) -> casts.PatchedFunctions:
        """Return what casts."""
        return self._mode

    @property
    def _is_active(self) -> bool:
        return self._mode.depth > 0 and torch.is_autocast_enabled(self._mode.device_type)

    @_is_active.setter
    def _is_active(self, value: bool) -> None:
        torch.set_autocast_enabled(self._mode.device_type, value)

    def is_active(self) -> bool:
        """Return whether functions are cast at the moment."""
        return self._is_active

    def _disable_casts(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._mode.device_type, enabled=False)

    def _deactivate(self) -> None:
        """End the casts for good."""
        self._clear_cache()
        casts.end(self._mode)
        self._mode.depth = 0
        self._patches.undo()

    def _clear_cache(self) -> None:
        self._mode.clear()

    @property
    def has_cache(self) -> bool:
        """Return whether casts of weights are kept."""
        return self._mode.table.keeps

    @property
    def cache(self) -> dict[Tensor, Tensor]:
        """Return the casts that are kept, by weight."""
        return self._mode.table.kept.items()

    def remove_cache(self, param: Tensor) -> None:
        """Let go of the casts of one weight."""
        self._mode.table.kept.clear(param)

    @property
    def verbose(self) -> bool:
        """Return whether every listed call is printed."""
        return self._mode.verbose

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Return an optimizer that scales losses itself, without ``initialize``."""
        return OptimWrapper(optimizer, self, num_loss)

    def scale_loss(self, loss: Tensor, optimizer: Any) -> AbstractContextManager[Tensor]:
        """Refuse: this is the interface before ``initialize``, which Apex's last releases refused too.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "handle.scale_loss is the old interface, which is no longer supported. Call model, optimizer = "
            "amp.initialize(model, optimizer, opt_level='O1') once, and amp.scale_loss(loss, optimizer) around each backward pass."
        )


class NoOpHandle:
    """Stand for casts that were never begun: ``init(enabled=False)``."""

    has_cache = False
    verbose = False

    def is_active(self) -> bool:
        """Return False."""
        return False

    def _disable_casts(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _deactivate(self) -> None:
        pass

    def _clear_cache(self) -> None:
        pass

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Return an optimizer whose losses are left as they are."""
        return OptimWrapper(optimizer, self, num_loss)

    def scale_loss(self, loss: Tensor, optimizer: Any) -> AbstractContextManager[Tensor]:
        """Return a context that gives ``loss`` as it is."""
        return nullcontext(loss)


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    device_type: str | None = None,
) -> AmpHandle | NoOpHandle:
    """Begin the casts of O1 without models and optimizers, and return their handle.

    Args:
        enabled: whether anything is to be done.
        loss_scale: unused, as in Apex's last releases: ``scale_loss`` belongs to ``initialize``.
        enable_caching: whether a weight that is used often in a forward pass is cast once.
        verbose: whether every listed call is printed.
        allow_banned: whether ``binary_cross_entropy`` runs in FP32 instead of refusing FP16.
        device_type: whose tensors are cast; CUDA's where there is one.
    """
    previous = getattr(_amp_state, "handle", None)
    if previous is not None:
        previous._deactivate()
    if not enabled or _amp_state.gives_way:
        _amp_state.handle = NoOpHandle()
        return _amp_state.handle
    kind = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    mode = casts.PatchedFunctions(kind, keeps_casts=enable_caching, allow_banned=allow_banned, verbose=verbose)
    _amp_state.handle = AmpHandle(mode)
    return _amp_state.handle


def disable_casts() -> AbstractContextManager[Any]:
    """Return a context in which torch's functions cast nothing."""
    handle = getattr(_amp_state, "handle", None)
    return nullcontext() if handle is None else handle._disable_casts()


def clear_cache() -> None:
    """Let go of the casts of weights that O1 keeps."""
    handle = getattr(_amp_state, "handle", None)
    if handle is not None:
        handle._clear_cache()
