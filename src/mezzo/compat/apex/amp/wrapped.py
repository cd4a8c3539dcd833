"""The interface before ``initialize``: ``init().wrap_optimizer(optimizer)``, whose losses have a scale each by their order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mezzo.compat.apex.amp.scaler import LossScaler
from mezzo.compat.apex.amp.state import master_params, maybe_print
from mezzo.engine.gradients import put_back, set_aside

if TYPE_CHECKING:
    from mezzo.compat.apex.amp.handle import AmpHandle, NoOpHandle


class OptimWrapper:
    """Scale losses one after the other, and skip a step after an overflow; everything else is the optimizer's."""

    def __init__(self, optimizer: Any, handle: AmpHandle | NoOpHandle, num_loss: int) -> None:
        self._optimizer, self._handle = optimizer, handle
        self._scalers = [LossScaler("dynamic") for _ in range(num_loss)]
        self._number = 0
        """Of the next loss, counted from the last step."""
        self._overflowed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    @contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """Give the loss times its scale; at the end unscale the gradients that its backward pass left.

        Raises:
            RuntimeError: there are more losses before a step than ``num_loss`` said.
        """
        if not self._handle.is_active():
            yield loss
            return
        if self._number >= len(self._scalers):
            raise RuntimeError(
                f"loss {self._number + 1} before step(); allowed: {len(self._scalers)}. Call step(), or pass a larger num_loss "
                "to wrap_optimizer."
            )
        scaler = self._scalers[self._number]
        parameters: list[Any] = list(master_params(self._optimizer))
        aside = set_aside(parameters)
        try:
            yield scaler.scaled(loss)
            scaler.clear_overflow_state()
            scaler.unscale_([p.grad for p in parameters if p.grad is not None])
        finally:
            put_back(aside)
        self._overflowed = scaler.update_scale() or self._overflowed
        self._number += 1
        self._handle._clear_cache()

    def step(self, closure: Any = None) -> Any:
        """Update, or change nothing if a gradient since the last step was not finite.

        Raises:
            NotImplementedError: a closure is given.
        """
        if not self._handle.is_active():
            return self._optimizer.step(closure)
        if closure is not None:
            raise NotImplementedError("The wrapped optimizer takes no closure. Call scale_loss, then step() with none.")
        overflowed, self._overflowed, self._number = self._overflowed, False, 0
        if overflowed:
            maybe_print("Gradient overflow, skipping update")
            return None
        with self._handle._disable_casts():
            return self._optimizer.step()
