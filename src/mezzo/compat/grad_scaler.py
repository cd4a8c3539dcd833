"""``torch.amp.GradScaler`` with a floor, a ceiling, a hysteresis and a count of skips, for hand-written loops.

It derives from torch's class, with the same numbers, order of calls and refusals, so ``isinstance`` holds and other libraries find
the attributes that they read. In addition the scale has a floor (torch's reaches 0 after 166 overflows) and optionally a
ceiling and a hysteresis; ``skipped`` counts. Where torch asserts, errors here say what to do.

A step of an optimizer that is not fused reads one flag from the device, as torch's does; a ``mezzo.Session`` reads none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from mezzo.engine.gradients import gradients_of, trained_by
from mezzo.engine.scaling import apply_hysteresis
from mezzo.errors import PolicyError, SessionError
from mezzo.formats import FP16, FP32


class GradScaler(torch.cuda.amp.GradScaler, torch.cpu.amp.grad_scaler.GradScaler):
    """A ``torch.amp.GradScaler`` with a floor, a ceiling, a hysteresis and a count of skips.

    Args:
        device: torch's device type.
        init_scale: first loss scale.
        growth_factor: factor of the scale after ``growth_interval`` good updates in a row; above 1.
        backoff_factor: factor of the scale on an overflow; below 1.
        growth_interval: good updates in a row before the scale grows.
        enabled: False leaves losses and steps unchanged.
        hysteresis: overflows in a row before the scale backs off.
        min_scale: floor of the scale.
        max_scale: ceiling of the scale.

    Raises:
        PolicyError: a setting is outside its range.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        hysteresis: int = 1,
        min_scale: float = 2.0**-24,
        max_scale: float = math.inf,
    ) -> None:
        on = enabled and not (device == "cuda" and torch.cuda.amp.common.amp_definitely_not_available())
        if on:
            _check_settings(init_scale, growth_factor, backoff_factor, hysteresis, min_scale, max_scale)
        # Not through the classes in between, which are deprecated and warn.
        torch.amp.GradScaler.__init__(
            self,
            device,
            init_scale=min(max(init_scale, min_scale), max_scale),
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self._hysteresis, self._min_scale, self._max_scale = hysteresis, min_scale, max_scale
        self._left: Tensor | int = hysteresis
        self._skips: Tensor | int = 0

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._left = torch.full((), int(self._left), dtype=torch.int32, device=dev)
        self._skips = torch.full((), float(self._skips), device=dev)

    def _check_scaled(self, call: str) -> None:
        if self._scale is None:
            raise SessionError(
                f"{call} before any loss was scaled; allowed: after scale(loss) and its backward pass",
                hint="call scaler.scale(loss).backward() first",
            )

    def scale(self, outputs: Any) -> Any:
        """Return a tensor, or tensors in lists and tuples, times the scale.

        Raises:
            SessionError: ``outputs`` is something else.
        """
        if self._enabled and not isinstance(outputs, (Tensor, Iterable)):
            raise SessionError(
                f"scale({outputs!r}); allowed: a tensor, or a list or tuple of tensors",
                hint="pass the loss that backward() is called on",
            )
        return super().scale(outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale an optimizer's gradients and check them, before they are clipped or read.

        Raises:
            SessionError: no loss was scaled yet, or the gradients are FP16 or were unscaled since the last ``update``.
        """
        if not self._enabled:
            return
        self._check_scaled("unscale_()")
        stage = self._per_optimizer_states[id(optimizer)]["stage"]
        if stage is not OptState.READY:
            done = "step()" if stage is OptState.STEPPED else "unscale_()"
            raise SessionError(
                f"unscale_({type(optimizer).__name__}) after {done} in the same update; allowed: once, before step()",
                hint="call update() once at the end of each iteration",
            )
        if any(p.grad is not None and p.grad.dtype is FP16.dtype for p in trained_by([optimizer])):
            raise SessionError(
                "unscale_() with FP16 gradients; allowed: FP32 ones, since FP16 would lose what the scale kept from underflow",
                hint="keep the weights in FP32 under autocast, or use mezzo.Session with policy fp16-master",
            )
        super().unscale_(optimizer)

    def _unscale_grads_(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        gradients_of(trained_by([optimizer]))  # coalesces sparse gradients first: a sum of rows may overflow
        found: dict[torch.device, Tensor] = super()._unscale_grads_(optimizer, *args, **kwargs)
        return found

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer unless a gradient is not finite; return the result of its ``step``, None if it is skipped.

        An optimizer that unscales by itself (``_step_supports_amp_scaling``) gets the scale and the flag, or this scaler if its
        ``step`` accepts one.

        Raises:
            SessionError: a closure was passed, no loss was scaled, there are no gradients, or the optimizer was stepped since the
                last ``update``.
        """
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        if "closure" in kwargs or (args and callable(args[0])):
            raise SessionError(
                "step() got a closure; allowed: none, since a closure's gradients cannot be checked before the step",
                hint="call backward() before step(), or leave the scaler out",
            )
        self._check_scaled("step()")
        if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED:
            raise SessionError(
                f"step({type(optimizer).__name__}) was called twice in one update; allowed: once",
                hint="call update() once at the end of each iteration",
            )
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            self._check_gradients(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def _check_gradients(self, optimizer: Optimizer) -> None:
        state = self._per_optimizer_states[id(optimizer)]
        if not state["found_inf_per_device"] and all(p.grad is None for p in trained_by([optimizer])):
            raise SessionError(
                "the optimizer's parameters have no gradients; allowed: gradients of a backward pass since zero_grad()",
                hint="call scaler.scale(loss).backward() before step()",
            )

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale from this iteration's checks, or set it; once, after all optimizers' steps.

        Raises:
            SessionError: no loss was scaled, no optimizer was stepped or unscaled since the last update, or ``new_scale`` is neither a
                float nor a tensor of one element.
        """
        if not self._enabled:
            return
        self._check_scaled("update()")
        if new_scale is None:
            self._learn()
        else:
            self._check_new(new_scale)
        super().update(new_scale)
        if new_scale is None and self._scale is not None:
            self._scale.clamp_(self._min_scale, self._max_scale)

    def _learn(self) -> None:
        """Count this iteration's overflow, and hide those that the hysteresis tolerates from torch's update."""
        states = self._per_optimizer_states.values()
        flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
        if not flags:
            raise SessionError(
                "update() without a check of gradients; allowed: after step() or unscale_() of an optimizer",
                hint="call step(optimizer) before update()",
            )
        assert self._scale is not None
        assert self._growth_tracker is not None
        assert isinstance(self._left, Tensor)
        any_inf = torch.stack([flag.to(self._scale.device, non_blocking=True) for flag in flags]).max()
        self._skips = self._skips + any_inf
        if self._hysteresis > 1:
            counts = apply_hysteresis(any_inf, self._left, self._growth_tracker, self._hysteresis)
            for flag in flags:
                flag.mul_(counts.to(flag.device))

    def _check_new(self, new_scale: Any) -> None:
        is_number = isinstance(new_scale, Tensor) and new_scale.numel() == 1 and not new_scale.requires_grad
        if not (isinstance(new_scale, float) or (is_number and new_scale.device.type == self._device)):
            raise SessionError(
                f"update({new_scale!r}); allowed: a float, or a tensor of one element on {self._device} without a gradient",
                hint="leave it out to let the scale learn, or pass a float",
            )

    @property
    def skipped(self) -> int:
        """The number of updates that had a gradient that was not finite; waits for the device."""
        return int(self._skips)

    def state_dict(self) -> dict[str, Any]:
        """Return a state that ``torch.amp.GradScaler`` loads too, empty if the scaler is disabled; waits for the device."""
        if not self._enabled:
            return {}
        bounds = {"min_scale": self._min_scale, "max_scale": self._max_scale}
        return {**super().state_dict(), "hysteresis": self._hysteresis, "hysteresis_left": int(self._left), **bounds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of ``torch.amp.GradScaler``.

        Raises:
            SessionError: the state is empty, as a disabled scaler's is, or lacks an entry.
        """
        if not self._enabled:
            return
        missing = [name for name in _ENTRIES if name not in state_dict]
        if missing:
            raise SessionError(
                "load_state_dict({}): the state is a disabled scaler's; allowed: a state with a scale"
                if not state_dict
                else f"load_state_dict() of a state without {', '.join(missing)}; allowed: one with {', '.join(_ENTRIES)}",
                hint="leave the call out, or save from a scaler that is enabled",
            )
        super().load_state_dict(state_dict)
        self._hysteresis = state_dict.get("hysteresis", self._hysteresis)
        self._min_scale = state_dict.get("min_scale", self._min_scale)
        self._max_scale = state_dict.get("max_scale", self._max_scale)
        left = state_dict.get("hysteresis_left", self._hysteresis)
        self._left = self._left.fill_(left) if isinstance(self._left, Tensor) else left

    def __getstate__(self) -> dict[str, Any]:
        if self._enabled and self._per_optimizer_states:
            raise SessionError(
                "a GradScaler is pickled between step() and update(); allowed: at the beginning of an iteration",
                hint="pickle it after update()",
            )
        return {**super().__getstate__(), "_left": int(self._left), "_skips": int(self._skips)}


_ENTRIES = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
"""The entries that torch reads from a state."""


def _check_settings(
    init_scale: float, growth_factor: float, backoff_factor: float, hysteresis: int, min_scale: float, max_scale: float
) -> None:
    largest = FP32.max
    rules: list[tuple[str, Any, bool, str]] = [
        ("init_scale", init_scale, abs(init_scale) <= largest or not math.isfinite(init_scale), f"up to {largest:g}"),
        ("growth_factor", growth_factor, not growth_factor <= 1.0, "above 1"),
        ("backoff_factor", backoff_factor, not backoff_factor >= 1.0, "below 1"),
        ("hysteresis", hysteresis, isinstance(hysteresis, int) and hysteresis >= 1, "a whole number of 1 or more"),
        ("min_scale", min_scale, 0 < min_scale <= max_scale, f"above 0, up to max_scale={max_scale:g}"),
    ]
    for name, value, valid, allowed in rules:
        if not valid:
            raise PolicyError(f"{name}={value!r}; allowed: {allowed}", hint=f"choose {name} inside that range")
