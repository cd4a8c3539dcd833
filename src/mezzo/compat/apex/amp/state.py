"""The state that the parts of ``amp`` share: one object per process, as in Apex. Scripts read and set its attributes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mezzo.compat.apex.amp.handle import AmpHandle
    from mezzo.compat.apex.amp.levels import Properties
    from mezzo.compat.apex.amp.scaler import LossScaler
    from mezzo.engine.casts.casting import Casting


class AmpState:
    """The decisions of ``initialize``; ``opt_properties`` is unset before it."""

    opt_properties: Properties

    def __init__(self) -> None:
        self.replaced_by_policy = False
        """Whether ``initialize`` does nothing, since a precision policy replaces amp."""
        self.handle: AmpHandle | None = None
        """The casts of O1; None before ``initialize`` and under other levels."""
        self.hard_override = False
        """Whether broken rules of ``initialize`` print a warning instead of raising."""
        self.allow_incoming_model_not_fp32 = False
        """Whether ``initialize`` accepts models with 16-bit weights."""
        self.verbosity = 1
        self.min_loss_scale: float | None = None
        self.max_loss_scale = 2.0**24
        self.loss_scalers: list[LossScaler] = []
        self.castings: list[Casting] = []
        """How the arithmetic of models with 16-bit weights is done, where it is emulated."""


_amp_state = AmpState()


def warn_or_err(message: str) -> None:
    """Raise a RuntimeError, or print it as a warning where ``hard_override`` is set."""
    if not _amp_state.hard_override:
        raise RuntimeError(message)
    print(f"Warning:  {message}")


def maybe_print(message: str, rank0: bool = False) -> None:
    """Print unless ``verbosity`` is 0; with ``rank0`` in the first process only."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    elsewhere = rank0 and distributed and torch.distributed.get_rank() != 0
    if _amp_state.verbosity > 0 and not elsewhere:
        print(message)


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Return the parameters that ``optimizer`` updates, one after the other: FP32 masters where there are any."""
    for group in optimizer.param_groups:
        yield from group["params"]
