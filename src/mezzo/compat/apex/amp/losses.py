"""``scale_loss``: the context around every backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from mezzo.compat.apex.amp.handle import clear_cache
from mezzo.compat.apex.amp.optimizers import AmpOptimizer
from mezzo.compat.apex.amp.scaler import LossScaler
from mezzo.compat.apex.amp.state import _amp_state


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Yield the loss in FP32 times the loss scale; at the end unscale the gradients of its backward pass.

    Earlier gradients are added unscaled, so accumulation survives a change of the scale.
    Where a gradient is not finite the scale backs off, and the next ``step`` of these optimizers changes nothing.

    Args:
        loss: of any format and shape.
        optimizers: the optimizer or optimizers, from ``initialize``, that the backward pass computes gradients for.
        loss_id: which of the ``num_losses`` loss scales to use.
        model: unused, as in Apex.
        delay_unscale: whether to leave gradients scaled for a later backward pass to unscale with its own.
        delay_overflow_check: whether to leave the scale as it is and skip nothing.

    Raises:
        RuntimeError: ``initialize`` was not called.
    """
    if not hasattr(_amp_state, "opt_properties"):
        raise RuntimeError(
            "amp.scale_loss before amp.initialize: amp has not been initialized. Call "
            "model, optimizer = amp.initialize(model, optimizer, opt_level=...) first."
        )
    if not _amp_state.opt_properties.enabled:
        yield loss
        return
    scaler = _scaler(loss_id)
    stashes = [_stash_of(o) for o in (optimizers if isinstance(optimizers, Iterable) else [optimizers])]
    with ExitStack() as stack:
        for casting in _amp_state.castings:
            stack.enter_context(casting.backward())
        if not _amp_state.opt_properties.master_weights and not scaler.dynamic and scaler.loss_scale() == 1.0:
            yield loss.float()
        else:
            with _unscaled(stashes, scaler, delay=delay_unscale):
                yield scaler.scaled(loss)
            if not delay_unscale and not delay_overflow_check and scaler.update_scale():
                for stash in stashes:
                    stash.skip(
                        f"Gradient overflow.  Skipping step, loss scaler {loss_id} reducing loss scale to {scaler.loss_scale()}"
                    )
    clear_cache()


@contextmanager
def _unscaled(stashes: list[AmpOptimizer], scaler: LossScaler, *, delay: bool) -> Iterator[None]:
    if delay:
        yield
        for stash in stashes:
            stash.params_have_scaled_gradients = True
        return
    for stash in stashes:
        if not stash.params_have_scaled_gradients:
            stash.prepare()
    try:
        yield
    except BaseException:
        for stash in stashes:
            stash.restore()
        raise
    scaler.clear_overflow_state()
    for stash in stashes:
        stash.finish(scaler)


def _scaler(loss_id: int) -> LossScaler:
    scalers = _amp_state.loss_scalers
    if not 0 <= loss_id < len(scalers):
        raise IndexError(
            f"loss_id={loss_id}; allowed: 0 to {len(scalers) - 1}. Pass num_losses={loss_id + 1} or more to amp.initialize."
        )
    return scalers[loss_id]


def _stash_of(optimizer: Any) -> AmpOptimizer:
    stash = getattr(optimizer, "_amp_stash", None)
    if not isinstance(stash, AmpOptimizer):
        raise RuntimeError(
            f"amp.scale_loss got a {type(optimizer).__name__} that did not come from amp.initialize. Pass the optimizers that "
            "amp.initialize returned."
        )
    return stash
