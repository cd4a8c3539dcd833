"""Loss scales: none, static, dynamic. Their state lives on the device.

FP16 holds nothing below 2**-24, and many gradients are smaller. The loss is multiplied by a scale, so that every
gradient is, and the gradients are divided by it in FP32 before the optimizer sees them (Micikevicius et al.,
arXiv:1710.03740, section 3.2).

The dynamic scale is found by trying, update by update::

    if a gradient is not finite:                  # the update is skipped
        growth_tracker = 0
        left -= 1
        if left <= 0:                             # ``hysteresis`` overflows in a row
            scale = max(scale * backoff_factor, min_scale)
    else:
        left = hysteresis
        growth_tracker += 1
        if growth_tracker == growth_interval:
            scale = min(scale * growth_factor, max_scale)
            growth_tracker = 0

With ``hysteresis=1`` and no floor or ceiling that is ``torch.amp.GradScaler``, number for number. All three classes
have the same methods: the training step never asks whether there is a scale.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from mezzo.engine.descriptions import number_of
from mezzo.errors import PolicyError
from mezzo.formats import FP32
from mezzo.policy import Policy


class NoScale:
    """No loss scale: gradients are neither divided nor checked."""

    checks = False
    """Whether an update with a gradient that is not finite is skipped."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss``."""
        return loss

    def inverse(self) -> Tensor | None:
        """Return the factor that unscales a gradient, None for 1."""
        return None

    def value(self) -> float:
        """Return the scale."""
        return 1.0

    def on_device(self) -> Tensor | float:
        """Return the scale without waiting for the device; the tensor changes with the scale."""
        return 1.0

    def update(self, found_inf: Tensor) -> None:
        """Ignore the result of an update."""

    def at_floor(self) -> bool:
        """Return whether the scale is at its minimum."""
        return False

    def floor_flag(self) -> Tensor | float:
        """Return 1 if the scale is at its minimum, else 0, without waiting for the device."""
        return 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Accept any state: a scale saved under another policy has no use here."""


class StaticScale(NoScale):
    """A fixed loss scale; an update with a gradient that is not finite is skipped."""

    checks = True

    def __init__(self, value: float, device: torch.device | str = "cpu") -> None:
        self._scale = torch.full((), value, dtype=FP32.dtype, device=device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({number_of(self._scale)})"  # a scale on a GPU stays there

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times the scale."""
        return loss * self._scale_on(loss.device)

    def _scale_on(self, device: torch.device) -> Tensor:
        """Return the scale on the loss's device, which need not be the first layer's if a model is spread over several."""
        return self._scale if self._scale.device == device else self._scale.to(device)

    def inverse(self) -> Tensor | None:
        """Return 1 / scale as an FP32 tensor on the device: an IEEE division, rounded once."""
        return self._scale.reciprocal()

    def value(self) -> float:
        """Return the scale; waits for the device."""
        return self._scale.item()

    def on_device(self) -> Tensor | float:
        """Return the scale without waiting for the device; the tensor changes with the scale."""
        return self._scale

    def state_dict(self) -> dict[str, Any]:
        """Return the scale; waits for the device."""
        return {"scale": self.value()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the scale from the state of any scaler, ``torch.amp.GradScaler``'s included."""
        if "scale" in state:
            self._scale.fill_(state["scale"])


class DynamicScale(StaticScale):
    """A dynamic loss scale: it backs off on overflow and grows after a number of good updates."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        min_scale: float = 2.0**-24,
        max_scale: float = 2.0**24,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(min(max(init_scale, min_scale), max_scale), device)
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self.min_scale, self.max_scale = min_scale, max_scale
        self._growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self._left = torch.full((), hysteresis, dtype=torch.int32, device=device)

    def __repr__(self) -> str:
        overflows = "an overflow" if self.hysteresis == 1 else f"{self.hysteresis} overflows in a row"
        grows = f"x{self.growth_factor:g} after {self.growth_interval} good updates, {number_of(self._growth_tracker)} so far"
        backs_off = f"x{self.backoff_factor:g} after {overflows}; {self.min_scale:g} to {self.max_scale:g}"
        return f"{type(self).__name__}({number_of(self._scale)}; {grows}; {backs_off})"

    def update(self, found_inf: Tensor) -> None:
        """Update the scale after an update, without waiting for the device.

        Args:
            found_inf: FP32, no dimensions: 1 where a gradient was not finite, else 0.
        """
        backs_off = found_inf
        if self.hysteresis > 1:
            backs_off = found_inf * bear(found_inf, self._left, self._growth_tracker, self.hysteresis)
        torch._amp_update_scale_(
            self._scale,
            self._growth_tracker,
            backs_off,
            self.growth_factor,
            self.backoff_factor,
            self.growth_interval,
        )
        self._scale.clamp_(self.min_scale, self.max_scale)

    def at_floor(self) -> bool:
        """Return whether the scale is at its minimum; waits for the device."""
        return self.value() <= self.min_scale

    def floor_flag(self) -> Tensor | float:
        """Return 1 if the scale is at its minimum, else 0, without waiting for the device."""
        return (self._scale <= self.min_scale).float()

    def state_dict(self) -> dict[str, Any]:
        """Return a state that ``torch.amp.GradScaler.load_state_dict`` takes too; waits for the device."""
        return {
            "scale": self.value(),
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": int(self._growth_tracker.item()),
            "hysteresis": self.hysteresis,
            "hysteresis_left": int(self._left.item()),
            "min_scale": self.min_scale,
            "max_scale": self.max_scale,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of this class or of ``torch.amp.GradScaler``, settings included, or the scale of a static one.

        Raises:
            PolicyError: the state is not one of a loss scale.
        """
        if not state:  # a disabled GradScaler's state, or NoScale's
            return
        if "scale" not in state:
            raise PolicyError(
                f"the state of a loss scale has no 'scale', only {', '.join(sorted(map(str, state)))}",
                hint="pass what state_dict() of a mezzo scale or of torch.amp.GradScaler returned",
            )
        for name in _SETTINGS:
            setattr(self, name, state.get(name, getattr(self, name)))
        self._scale.fill_(state["scale"])
        self._growth_tracker.fill_(state.get("_growth_tracker", 0))
        self._left.fill_(state.get("hysteresis_left", self.hysteresis))


def bear(found_inf: Tensor, left: Tensor, growth_tracker: Tensor, hysteresis: int) -> Tensor:
    """Count consecutive overflows, and return 0 for one that the hysteresis tolerates, else 1.

    Args:
        found_inf: FP32, no dimensions: above 0 where a gradient was not finite.
        left: overflows until the scale backs off; counted down, and reset by a good update.
        growth_tracker: the scale's; set to -1, since torch's update takes a tolerated overflow for a good update and adds 1.
        hysteresis: consecutive overflows that make the scale back off.
    """
    found = found_inf > 0
    left.copy_(torch.where(found, left - 1, hysteresis))
    borne = found & (left > 0)
    growth_tracker.masked_fill_(borne, -1)
    return (~borne).to(found_inf.dtype)


_SETTINGS = (
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "hysteresis",
    "min_scale",
    "max_scale",
)

Scale: TypeAlias = NoScale | StaticScale | DynamicScale


def scale_for(policy: Policy, device: torch.device | str) -> Scale:
    """Return the loss scale that ``policy`` asks for, its state on ``device``."""
    if policy.loss_scale == "none":
        return NoScale()
    if policy.loss_scale == "static":
        return StaticScale(policy.init_scale, device)
    return DynamicScale(
        policy.init_scale,
        growth_factor=policy.growth_factor,
        backoff_factor=policy.backoff_factor,
        growth_interval=policy.growth_interval,
        hysteresis=policy.hysteresis,
        min_scale=policy.min_scale,
        max_scale=policy.max_scale,
        device=device,
    )
