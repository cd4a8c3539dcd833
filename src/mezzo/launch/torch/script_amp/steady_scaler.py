"""Record the calls of a script's own GradScaler in a steady run, without the checks that the first updates have passed.

A step calls a GradScaler three times: ``scale``, ``step`` and ``update``. Outside the steady state each call is checked, wrapped twice and
recorded, which takes a seventh of a small model's step. In a steady run, the calls go straight to torch. A step then records only its
unscaled loss (the argument of ``scale``), whether its update was skipped, and the scale after it. A call out of the usual order, a skipped
update, another optimizer or another scaler ends the steady state; the lint then reads the calls so far from torch's own record of them.

A fused optimizer skips its update on the device: its flag is not read, but kept alongside the loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from mezzo.launch.patches import Patches
from mezzo.observe.lint.gradients import GradientState
from mezzo.observe.lint.scalers import METHODS

if TYPE_CHECKING:
    from mezzo.launch.torch.state import Run


class SteadyScaler:
    """The GradScaler of a steady run, and the loss that it scaled last."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._torch_methods: dict[str, Callable[..., Any]] = {name: getattr(GradScaler, name) for name in METHODS}
        """The methods without our hooks, which are set later."""
        self.scaler: Any = None
        """The scaler; None unless the run is steady and has one."""
        self.scaled: Tensor | None = None
        """What ``scale`` returned last, until its backward pass."""
        self.loss: Tensor | None = None
        """The loss that ``scaled`` is a multiple of."""
        self._state = GradientState()
        """What the lint knows about the optimizer's gradients."""
        self._skips_on_device = False
        """Whether the optimizer is fused: its step is always called, and decides on the device whether to skip."""

    def install(self, patches: Patches) -> None:
        """Shorten the calls until ``patches`` are undone. Call this after the hooks that record them in full are set."""
        for name, shorten in zip(METHODS, (self._scale, self._unscale, self._step, self._update), strict=True):
            patches.wrap(GradScaler, name, functools.partial(shorten, self._torch_methods[name]))

    def begin(self, scaler: Any, optimizer: Any) -> int | None:
        """Begin to shorten the calls of ``scaler``; return how many numbers a step keeps besides its loss, None if that is impossible."""
        run = self._run
        if run.applied is not None or not isinstance(scaler, GradScaler) or not isinstance(scaler._scale, Tensor):
            return None
        if run.lint.scalers.state_of(scaler) is None:
            return None
        self.scaler = scaler
        self._state = run.lint.gradient_state(optimizer)
        self._skips_on_device = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        return 1 + self._skips_on_device

    def end(self) -> None:
        """Let the calls be recorded in full again."""
        scaler, self.scaler = self.scaler, None
        if scaler is not None:
            self._run.lint.scalers.catch_up(scaler)

    def take_loss(self) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """Return and forget the loss scaled last, with the previous step's other numbers: the device's flag, if any, and the scale."""
        loss, self.loss, self.scaled = self.loss, None, None
        scale: Any = None if self.scaler is None else self.scaler._scale
        skipped = self._run.open_skipped
        return loss, (skipped, scale) if isinstance(skipped, Tensor) else (scale,)

    def _scale(self, torch_method: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        run = self._run

        @functools.wraps(original)
        def scale(scaler: Any, outputs: Any) -> Any:
            if self.scaler is scaler and type(outputs) is Tensor:
                run.scaled_by_script = True
                self.loss = outputs
                self.scaled = scaled = torch_method(scaler, outputs)
                return scaled
            return original(scaler, outputs)

        return scale

    def _unscale(self, torch_method: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def unscale_(scaler: Any, optimizer: Any) -> Any:
            if self.scaler is scaler:
                if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
                    return torch_method(scaler, optimizer)
                self._run.steady.end()
            return original(scaler, optimizer)

        return unscale_

    def _step(self, torch_method: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        run = self._run

        @functools.wraps(original)
        def step(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self.scaler is not None:
                if (
                    self.scaler is scaler
                    and not run.stepped
                    and optimizer is run.steady.optimizer()
                    and not kwargs
                    and (not args or args == (None,))
                    and scaler._per_optimizer_states[id(optimizer)]["stage"] is not OptState.STEPPED
                ):
                    result = torch_method(scaler, optimizer, *args)
                    if run.stepped:  # set by the hook before the optimizer's own step
                        self._state.made += 1
                        run.lint.scalers.num_steps += 1
                        if self._skips_on_device:
                            run.open_skipped = self._state.flag = found_on_device(scaler, optimizer)
                    else:
                        run.steady.end()
                        run.lint.scaler_skipped(optimizer)
                        run.script_stepped(scaler, optimizer, skipped=True)
                    return result
                run.steady.end()
            return original(scaler, optimizer, *args, **kwargs)

        return step

    def _update(self, torch_method: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        run = self._run

        @functools.wraps(original)
        def update(scaler: Any, new_scale: Any = None) -> Any:
            if self.scaler is scaler:
                if new_scale is None and scaler._per_optimizer_states:
                    run.scaled_by_script = False
                    return torch_method(scaler)
                run.steady.end()
            return original(scaler, new_scale)

        return update


def found_on_device(scaler: GradScaler, optimizer: Any) -> Tensor:
    """Return a flag above 0 if ``scaler`` has found non-finite gradients of ``optimizer``, without waiting for the device."""
    found = [*scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()]
    flag: Tensor = sum((other.to(found[0].device) for other in found[1:]), start=found[0])
    return flag
