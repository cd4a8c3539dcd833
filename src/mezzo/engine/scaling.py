"""Loss scales: none, static, dynamic. Their state lives on the device.

FP16 has no numbers below 2**-24, and many gradients are smaller. The loss is multiplied by a scale, which scales every
gradient, and the gradients are divided by it in FP32 before the optimizer uses them (Micikevicius et al.,
arXiv:1710.03740, section 3.2).

The dynamic scale is found by trial, update by update::

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

import math
from ctypes import c_float
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mezzo.engine.descriptions import number_of
from mezzo.errors import PolicyError
from mezzo.formats import FP32
from mezzo.policy import Policy
from mezzo.policyfields import DYNAMIC_SCALE


class NoScale:
    """No loss scale: gradients are neither divided nor checked."""

    skips_overflows = False
    """Whether an update with a gradient that is not finite is skipped."""
    adapts = False
    """Whether overflows lower the scale."""
    calm: float = math.inf
    """Number of good updates that cannot change the scale: a caller may subtract 1 for one of them instead of calling ``updated``."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss``."""
        return loss

    def inverse(self) -> Tensor | None:
        """Return the factor that unscales a gradient; None for 1."""
        return None

    def value(self) -> float:
        """Return the scale."""
        return 1.0

    def on_device(self) -> Tensor | float:
        """Return the scale without waiting for the device; the tensor changes with the scale."""
        return 1.0

    def update(self, found_inf: Tensor) -> None:
        """Ignore the result of an update."""

    def updated(self, *, skipped: bool) -> None:
        """Update the scale like ``update``, after an update whose result the host knows."""

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
        """Accept any state: without a loss scale, one saved under another policy is not used."""


class StaticScale(NoScale):
    """A fixed loss scale; an update with a gradient that is not finite is skipped."""

    skips_overflows = True

    def __init__(self, value: float, device: torch.device | str = "cpu") -> None:
        self._scale = self._device_scale = torch.full((), value, dtype=FP32.dtype, device=device)
        self._host_value = c_float(value).value  # rounded as on the device, and nothing read

    def __repr__(self) -> str:
        return f"{type(self).__name__}({number_of(self._scale)})"  # a scale on a GPU stays there

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times the scale."""
        scale = self._device_scale
        # The loss of a model that is spread over several devices may be on another device than its first layer.
        return loss * (scale if scale.device == loss.device else scale.to(loss.device))

    def inverse(self) -> Tensor | None:
        """Return 1 / scale as an FP32 tensor on the device: an IEEE division, rounded once."""
        return torch.full_like(self._scale, inverse_of(self._host_value))

    def value(self) -> float:
        """Return the scale."""
        return self._host_value

    def on_device(self) -> Tensor:
        """Return the scale without waiting for the device; the tensor changes with the scale."""
        return self._device_scale

    def state_dict(self) -> dict[str, Any]:
        """Return the scale."""
        return {"scale": self.value()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the scale from the state of any scaler, ``torch.amp.GradScaler``'s included."""
        if "scale" in state:
            _refuse_no_scale(state["scale"])
            self._scale.fill_(state["scale"])
            self._host_value = c_float(state["scale"]).value


class DynamicScale(StaticScale):
    """A dynamic loss scale: it backs off on overflow and grows after a number of good updates."""

    adapts = True
    calm = 0

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
            found_inf: FP32, no dimensions: 1 if a gradient was not finite, else 0.
        """
        backs_off = found_inf
        if self.hysteresis > 1:
            backs_off = found_inf * apply_hysteresis(found_inf, self._left, self._growth_tracker, self.hysteresis)
        torch._amp_update_scale_(
            self._scale,
            self._growth_tracker,
            backs_off,
            self.growth_factor,
            self.backoff_factor,
            self.growth_interval,
        )
        self._scale.clamp_(self.min_scale, self.max_scale)

    def updated(self, *, skipped: bool) -> None:
        """Update the scale like ``update``, after an update whose result the host knows."""
        self.update(torch.full((), float(skipped), dtype=FP32.dtype, device=self._scale.device))

    def inverse(self) -> Tensor | None:
        """Return 1 / scale as an FP32 tensor on the device: an IEEE division, rounded once."""
        return self._scale.reciprocal()

    def value(self) -> float:
        """Return the scale; waits for the device."""
        return self._scale.item()

    def at_floor(self) -> bool:
        """Return whether the scale is at its minimum; waits for the device."""
        return self.value() <= self.min_scale

    def floor_flag(self) -> Tensor | float:
        """Return 1 if the scale is at its minimum, else 0, without waiting for the device."""
        return (self._scale <= self.min_scale).float()

    def state_dict(self) -> dict[str, Any]:
        """Return a state that ``torch.amp.GradScaler.load_state_dict`` also accepts; waits for the device."""
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
            PolicyError: the state is not a loss scale's.
        """
        if not state:  # a disabled GradScaler's state, or NoScale's
            return
        if "scale" not in state:
            raise PolicyError(
                f"the state of a loss scale has no 'scale', only {', '.join(sorted(map(str, state)))}",
                hint="pass what state_dict() of a mezzo scale or of torch.amp.GradScaler returned",
            )
        _refuse_no_scale(state["scale"])
        for name in DYNAMIC_SCALE:
            setattr(self, name, state.get(name, getattr(self, name)))
        self._scale.fill_(state["scale"])
        self._growth_tracker.fill_(state.get("_growth_tracker", 0))
        self._left.fill_(state.get("hysteresis_left", self.hysteresis))


class KnownScale(DynamicScale):
    """A dynamic scale for a loop that reads every update's flag: its state is on the host, and only the scale is on the device.

    The numbers equal ``DynamicScale``'s. An update that cannot change the scale costs a subtraction instead of two kernels, and
    reading the scale never waits.
    """

    def __init__(self, init_scale: float = 2.0**16, *, device: torch.device | str = "cpu", **settings: Any) -> None:
        super().__init__(init_scale, **settings)
        self._device_scale = torch.empty((), dtype=FP32.dtype, device=device)
        self._changed(self._host_value, num_good=0)

    def __repr__(self) -> str:
        self._settle()
        return super().__repr__()

    def _changed(self, value: float, *, num_good: int) -> None:
        """Copy a new scale to the device, and count the good updates that cannot change it, after ``num_good`` with it."""
        self._host_value = value
        self._device_scale.fill_(value)
        self._inverse = torch.full_like(self._device_scale, inverse_of(value))  # a running pass keeps the earlier one
        self._begin_calm(num_good)

    def _begin_calm(self, num_good: int) -> None:
        self.calm = self._calm_before = max(self.growth_interval - 1 - num_good, 0)

    def _settle(self) -> None:
        """Count the good updates that were subtracted from ``calm``."""
        good = int(self._calm_before - self.calm)
        if good:
            self._growth_tracker.add_(good)
            self._left.fill_(self.hysteresis)
            self._calm_before = self.calm

    def inverse(self) -> Tensor | None:
        """Return 1 / scale as an FP32 tensor on the device."""
        return self._inverse

    def value(self) -> float:
        """Return the scale."""
        return self._host_value

    def update(self, found_inf: Tensor) -> None:
        """Update the scale after an update; waits for the device.

        Args:
            found_inf: FP32, no dimensions: 1 if a gradient was not finite, else 0.
        """
        self.updated(skipped=bool(found_inf > 0))

    def updated(self, *, skipped: bool) -> None:
        """Update the scale like ``update``, after an update whose result the host knows."""
        if not skipped and self.calm > 0:
            self.calm -= 1
            return
        self._settle()
        super().update(torch.full((), float(skipped), dtype=FP32.dtype))
        value, num_good = self._scale.item(), int(self._growth_tracker.item())
        if value != self._host_value:
            self._changed(value, num_good=num_good)
        else:
            self._begin_calm(num_good)

    def state_dict(self) -> dict[str, Any]:
        """Return a state that ``torch.amp.GradScaler.load_state_dict`` also accepts."""
        self._settle()
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of any scale, as ``DynamicScale`` does."""
        self._settle()
        super().load_state_dict(state)
        self._changed(self._scale.item(), num_good=int(self._growth_tracker.item()))


def _refuse_no_scale(scale: Any) -> None:
    if not 0 < float(scale) < math.inf:
        raise PolicyError(
            f"the state of a loss scale has the scale {float(scale)}; allowed: a finite number above 0",
            hint="pass what state_dict() of a mezzo scale or of torch.amp.GradScaler returned",
        )


def inverse_of(scale: float) -> float:
    """Return 1 / scale as FP32 division computes it; FP64's quotient, rounded to FP32, is the same.

    Computed on the host, because a script's first module call may create a scale while a policy casts every operation on tensors.
    """
    return c_float(1.0 / scale).value if scale else math.inf


def apply_hysteresis(found_inf: Tensor, left: Tensor, growth_tracker: Tensor, hysteresis: int) -> Tensor:
    """Count consecutive overflows, and return 0 while the hysteresis tolerates them, else 1.

    Args:
        found_inf: FP32, no dimensions: above 0 if a gradient was not finite.
        left: overflows until the scale backs off; counted down, and reset by a good update.
        growth_tracker: the scale's; set to -1, since torch's update counts a tolerated overflow as a good update and adds 1.
        hysteresis: consecutive overflows that make the scale back off.
    """
    overflowed = found_inf > 0
    left.copy_(torch.where(overflowed, left - 1, hysteresis))
    tolerated = overflowed & (left > 0)
    growth_tracker.masked_fill_(tolerated, -1)
    return (~tolerated).to(found_inf.dtype)


Scale: TypeAlias = NoScale | StaticScale | DynamicScale


def scale_for(policy: Policy, device: torch.device | str, *, known: bool = False) -> Scale:
    """Return the loss scale that ``policy`` asks for.

    Args:
        policy: the policy.
        device: the device of the scale's state.
        known: whether the host reads every update's flag: then only the scale itself is on ``device``.
    """
    if policy.loss_scale == "none":
        return NoScale()
    if policy.loss_scale == "static":
        return StaticScale(policy.init_scale, device)
    settings = {name: getattr(policy, name) for name in DYNAMIC_SCALE}
    return (KnownScale if known else DynamicScale)(policy.init_scale, **settings, device=device)
