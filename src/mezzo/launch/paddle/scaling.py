"""A loss scale on the host: the same values as in ``mezzo.engine.scaling``, without torch.

Paddle's own GradScaler is not used, on any device: it does not work on a CPU or for BF16, has no ceiling, restarts its count
of overflows after each backoff, and prints a line at each. Using the same logic everywhere also makes runs in two
frameworks comparable. Cost: one flag per step is read from the device, as by any scaler that skips steps.
"""

from __future__ import annotations

import math

import numpy as np

from mezzo.policy import Policy


class HostScale:
    """The loss scale of a policy: none, static or dynamic."""

    def __init__(self, policy: Policy | None) -> None:
        self._policy = Policy() if policy is None else policy
        self.checks = self._policy.loss_scale != "none"
        """Whether an update with a non-finite gradient is skipped."""
        self.value = _fp32(self._policy.init_scale) if self.checks else 1.0
        self._growth_tracker, self._left = 0, self._policy.hysteresis

    @property
    def inverse(self) -> float:
        """1 / scale, rounded once to FP32."""
        return _fp32(1.0 / self.value)

    def at_floor(self) -> bool:
        """Return whether the scale is at its smallest value."""
        return self._policy.loss_scale == "dynamic" and self.value <= self._policy.min_scale

    def update(self, *, overflow: bool) -> None:
        """Update a dynamic scale after an update."""
        policy = self._policy
        if policy.loss_scale != "dynamic":
            return
        if overflow:
            self._growth_tracker = 0
            self._left -= 1
            if self._left <= 0:
                self._set(self.value * policy.backoff_factor)
            return
        self._left = policy.hysteresis
        self._growth_tracker += 1
        if self._growth_tracker == policy.growth_interval:
            self._growth_tracker = 0
            self._set(self.value * policy.growth_factor)

    def _set(self, value: float) -> None:
        rounded = _fp32(value)
        if math.isfinite(rounded):
            self.value = min(max(rounded, self._policy.min_scale), self._policy.max_scale)


def _fp32(value: float) -> float:
    return float(np.float32(value))
