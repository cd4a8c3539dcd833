"""The face of ``torch.amp.GradScaler`` over the engine's loss scale, for loops that are written by hand.

Same methods, same numbers, same order of calls. What is different: the scale has a floor (torch's reaches 0 after two
hundred overflows) and, where asked, a ceiling and a hysteresis; ``skipped`` counts. A step of an optimizer that is not
fused reads one flag from the device, as with torch; a ``mezzo.Session`` reads none.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.engine.gradients import any_not_finite
from mezzo.engine.scaling import DynamicScale
from mezzo.errors import SessionError
from mezzo.formats import FP16


class GradScaler:
    """Scale losses, unscale gradients, skip updates that overflow, find the scale."""

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
        if enabled and device == "cuda" and not torch.cuda.is_available():
            warnings.warn("GradScaler is enabled, but CUDA is not available. Disabling.", stacklevel=2)
            enabled = False
        self._enabled = enabled
        self._scale = DynamicScale(
            init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            min_scale=min_scale,
            max_scale=max_scale,
            device=device if enabled else "cpu",
        )
        self._found: WeakKeyDictionary[Optimizer, Tensor] = WeakKeyDictionary()
        """By optimizer whose gradients were checked since the last update: 1 where one was not finite, else 0."""
        self._stepped: WeakKeyDictionary[Optimizer, None] = WeakKeyDictionary()
        self._skips = torch.zeros((), device=device if enabled else "cpu")

    def scale(self, outputs: Any) -> Any:
        """Return a tensor, or tensors in lists and tuples, times the scale."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            return self._scale.scale(outputs)
        if isinstance(outputs, Iterable):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
        raise SessionError(
            f"scale({outputs!r}); allowed: a tensor, or a list or tuple of such",
            hint="pass the loss that backward() is called on",
        )

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the scale out of an optimizer's gradients and check them, before they are clipped or read.

        Raises:
            SessionError: they were unscaled since the last ``update``, or are FP16.
        """
        if not self._enabled:
            return
        if optimizer in self._stepped or optimizer in self._found:
            done = "step()" if optimizer in self._stepped else "unscale_()"
            raise SessionError(
                f"unscale_({type(optimizer).__name__}) after {done} in the same update; allowed: once, before step()",
                hint="call update() once at the end of each iteration",
            )
        gradients = _gradients(optimizer)
        if any(gradient.dtype == FP16.dtype for gradient in gradients):
            raise SessionError(
                "unscale_() with FP16 gradients; allowed: FP32 ones, since what the scale kept from underflow would be lost",
                hint="keep the weights in FP32 under autocast, or use mezzo.Session with policy fp16-master",
            )
        inverse = self._scale.inverse()
        assert inverse is not None
        for gradient in gradients:
            gradient.mul_(inverse.to(gradient.device))
        self._found[optimizer] = self._check(gradients)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer unless a gradient is not finite; return what its ``step`` returns, None where it is skipped.

        Raises:
            SessionError: a closure was passed, or the optimizer was stepped since the last ``update``.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or args:
            raise SessionError(
                "step() was given a closure; allowed: none, since a closure's gradients cannot be checked before the step",
                hint="call backward() before step(), or leave the scaler out",
            )
        if optimizer in self._stepped:
            raise SessionError(
                f"step({type(optimizer).__name__}) was called twice in one update; allowed: once",
                hint="call update() once at the end of each iteration",
            )
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            return self._step_fused(optimizer, **kwargs)
        if optimizer not in self._found:
            self.unscale_(optimizer)
        self._stepped[optimizer] = None
        if self._found[optimizer].item():
            return None
        return optimizer.step(**kwargs)

    def _step_fused(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Hand scale and flag to an optimizer that unscales and skips by itself, on the device."""
        unscaled = optimizer in self._found
        if not unscaled:
            self._found[optimizer] = self._check(_gradients(optimizer))
        self._stepped[optimizer] = None
        fused: Any = optimizer
        fused.grad_scale = None if unscaled else self._scale.scale(torch.ones_like(self._skips))
        fused.found_inf = self._found[optimizer]
        try:
            return optimizer.step(**kwargs)
        finally:
            del fused.grad_scale, fused.found_inf

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Let the scale learn from this iteration's checks, or set it; once, after all optimizers' steps.

        Raises:
            SessionError: no optimizer was stepped or unscaled since the last update.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            self._scale.load_state_dict({**self._scale.state_dict(), "scale": float(new_scale)})
        elif self._found:
            found = torch.stack(list(self._found.values())).max()
            self._skips += found
            self._scale.update(found)
        else:
            raise SessionError(
                "update() without a check of gradients; allowed: after step() or unscale_() of an optimizer",
                hint="call step(optimizer) before update()",
            )
        self._found.clear()
        self._stepped.clear()

    def _check(self, gradients: list[Tensor]) -> Tensor:
        if not gradients:
            raise SessionError(
                "the optimizer's parameters have no gradients; allowed: gradients of a backward pass since zero_grad()",
                hint="call scaler.scale(loss).backward() before step()",
            )
        return any_not_finite(gradients).to(self._skips.device)

    @property
    def skipped(self) -> int:
        """Return how many updates had a gradient that was not finite; waits for the device."""
        return int(self._skips.item())

    def is_enabled(self) -> bool:
        """Return whether losses are scaled."""
        return self._enabled

    def get_scale(self) -> float:
        """Return the scale, 1 where it is off; waits for the device."""
        return self._scale.value() if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        """Return what the scale grows by."""
        return self._scale.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set what the scale grows by."""
        self._scale.growth_factor = new_factor

    def get_backoff_factor(self) -> float:
        """Return what the scale backs off by."""
        return self._scale.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set what the scale backs off by."""
        self._scale.backoff_factor = new_factor

    def get_growth_interval(self) -> int:
        """Return after how many good updates in a row the scale grows."""
        return self._scale.growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set after how many good updates in a row the scale grows."""
        self._scale.growth_interval = new_interval

    def state_dict(self) -> dict[str, Any]:
        """Return a state that ``torch.amp.GradScaler`` takes too, empty where the scale is off."""
        return self._scale.state_dict() if self._enabled else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state of this class or of ``torch.amp.GradScaler``.

        Raises:
            SessionError: the state is empty, as one of a scaler that was off is.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise SessionError(
                "load_state_dict({}): the state is of a scaler that was off; allowed: a state with a scale",
                hint="leave the call out, or save from a scaler that is enabled",
            )
        self._scale.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        if self._found:
            raise SessionError(
                "a GradScaler is pickled between step() and update(); allowed: at the beginning of an iteration",
                hint="pickle it after update()",
            )
        return {name: value for name, value in vars(self).items() if name not in ("_found", "_stepped")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _found=WeakKeyDictionary(), _stepped=WeakKeyDictionary())


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    """Return the values of an optimizer's gradients; a sparse one's are added up first, so that each counts once."""
    found = []
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
        found.append(parameter.grad._values() if parameter.grad.is_sparse else parameter.grad)
    return found
