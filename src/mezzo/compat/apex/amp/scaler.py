"""Apex's loss scaler over the engine's scales.

The scale is on the CPU: whether ``optimizer.step`` is skipped is decided in Python after every backward pass, so the
overflow flag has to reach the CPU anyway. One wait per backward pass; Apex without its CUDA extension had one per
parameter.

A static scale checks nothing and skips nothing, as in Apex.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mezzo.engine.gradients import any_not_finite
from mezzo.engine.scaling import DynamicScale, StaticScale
from mezzo.formats import FP32


class LossScaler:
    """A loss scale, static or dynamic.

    Args:
        loss_scale: ``"dynamic"``, or a fixed scale.
        init_scale: start of a dynamic scale, within its bounds.
        scale_factor: by how much it grows and backs off.
        scale_window: backward passes without overflow after which it grows.
        min_loss_scale: floor of a dynamic scale; None leaves it FP32's smallest normal number.
        max_loss_scale: ceiling of a dynamic scale.
    """

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        self._static_unskipped = 0
        self._flags: list[Tensor] = []
        self._scale: StaticScale = StaticScale(1.0 if self.dynamic else float(loss_scale))
        if self.dynamic:
            self._scale = DynamicScale(
                init_scale,
                growth_factor=scale_factor,
                backoff_factor=1.0 / scale_factor,
                growth_interval=scale_window,
                min_scale=min_loss_scale or FP32.min_normal,
                max_scale=max_loss_scale,
            )

    def loss_scale(self) -> float:
        """Return the scale."""
        return self._scale.value()

    @property
    def _loss_scale(self) -> float:
        return self.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self._set(scale=float(value))

    @property
    def _unskipped(self) -> int:
        """Backward passes without overflow since the scale last changed."""
        return int(self._scale.state_dict().get("_growth_tracker", self._static_unskipped))

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self._static_unskipped = value
        self._set(_growth_tracker=value)

    def _set(self, **changed: Any) -> None:
        self._scale.load_state_dict({**self._scale.state_dict(), **changed})

    @property
    def _has_overflow(self) -> bool:
        """Whether a gradient since ``clear_overflow_state`` was not finite; waits for the device."""
        if not self._flags:
            return False
        return bool(torch.stack([flag.to(self._flags[0].device) for flag in self._flags]).any())

    def clear_overflow_state(self) -> None:
        """Clear the overflow flag of the last backward pass."""
        self._flags = []

    def scaled(self, loss: Tensor) -> Tensor:
        """Return ``loss`` in FP32 times the scale."""
        return self._scale.scale(loss.float())

    def unscale_(self, gradients: Sequence[Tensor]) -> None:
        """Unscale gradients in place, and record whether one is not finite.

        Args:
            gradients: in any formats, sparse ones included.
        """
        self._divide(self._recorded(gradients))

    def unscaled(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return 16-bit gradients in FP32 without the scale, and record whether one is not finite."""
        self._recorded(gradients)
        wide = [g.float() for g in gradients]
        self._divide(wide)
        return wide

    def _divide(self, gradients: list[Tensor]) -> None:
        if gradients and self.loss_scale() != 1.0:
            torch._foreach_mul_(gradients, 1.0 / self.loss_scale())

    def _recorded(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        values = [g._values() if g.is_sparse else g for g in gradients]
        if self.dynamic and values:
            self._flags.append(any_not_finite(values))
        return values

    def update_scale(self) -> bool:
        """Update the scale; return whether the update is to be skipped. Waits for the device."""
        if not self.dynamic:
            self._static_unskipped += 1
            return False
        overflowed = self._has_overflow
        self._scale.update(torch.tensor(float(overflowed)))
        return overflowed

    def state_dict(self) -> dict[str, float | int]:
        """Return the scale and the count of backward passes without overflow, under Apex's names."""
        return {"loss_scale": self.loss_scale(), "unskipped": self._unskipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned here or in Apex."""
        self._loss_scale, self._unskipped = state["loss_scale"], state["unskipped"]
