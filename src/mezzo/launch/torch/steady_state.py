"""Detect when only losses, times and an occasional norm are left to record, and record only those.

The first hundred updates of a script are checked for everything that can go wrong. After that, with one optimizer, most hooks around
each step and backward pass have nothing to do, and finding that out takes a tenth of a small model's step. Anything new in the script
(an optimizer, a GradScaler, compiled code, a session) ends the steady state until another update has been recorded in full. With a loss
scale, a pass that cannot be unscaled in one call (``batched_unscaling``) and an update that is skipped or changes the scale are recorded
in full, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from mezzo.launch.patches import Patches
from mezzo.launch.torch.gradients.batched_unscaling import BatchedUnscaling
from mezzo.launch.torch.gradients.update_losses import UpdateLosses
from mezzo.launch.torch.listeners import Listeners
from mezzo.launch.torch.phase import Phase
from mezzo.launch.torch.precision import ScriptPrecision
from mezzo.launch.torch.script_objects import ScriptObjects
from mezzo.launch.torch.updates.open_update import OpenUpdate
from mezzo.observe.lint.gradients import GradientState
from mezzo.observe.lint.observer import Lint
from mezzo.observe.lint.scalers import METHODS

EVERY_NORM = 100
"""First steps whose gradient norms are all computed, even if no loss scale needs them."""


def _nothing() -> None:
    """Return None, as a weak reference to an object that is gone does."""


class Steady:
    """The steady state of a run, and the recording of its steps during it."""

    def __init__(
        self,
        precision: ScriptPrecision,
        update: OpenUpdate,
        objects: ScriptObjects,
        phase: Phase,
        listeners: Listeners,
        lint: Lint,
        losses: UpdateLosses,
    ) -> None:
        self._precision, self._update, self._objects, self._phase = precision, update, objects, phase
        self._listeners, self._lint, self._losses = listeners, lint, losses
        self.made_by: frozenset[int] = frozenset()
        """The number of ``optimizer``, whose updates are not recorded one by one."""
        self.batched = BatchedUnscaling(precision)
        self.scaler_calls = SteadyScaler(self, precision, update, lint)
        """The calls of the script's own GradScaler."""
        self.optimizer: Callable[[], torch.optim.Optimizer | None] = _nothing
        """Returns the script's only optimizer while the run is steady; None otherwise."""
        self._last: Callable[[], torch.optim.Optimizer | None] = _nothing
        """Returns the optimizer that stepped last; None until one has."""

    def update_made(self, optimizer: torch.optim.Optimizer) -> None:
        """Count an update that was recorded in full."""
        self._last = ref(optimizer)

    def begin(self) -> None:
        """Begin the steady state if the checks of the first hundred updates can find nothing more."""
        if self._listeners.observer is not None or self._phase.compiles or not self._lint.over:
            return
        if len(self._objects.optimizers) != 1 or self._losses.may_be_several:
            return
        if self._precision.effective is not None and self._precision.effective.world > 1:
            return  # every backward pass has a reduction to emulate
        optimizer = self._last()
        if optimizer is None or optimizer not in self._objects.optimizers:
            return
        number, casting = self._objects.numbers.number(optimizer), self._precision.main_casting
        if number is None or (casting is not None and casting.table is not None):
            return  # with a cast table, a backward pass has a region of its own
        if not all(listener.done(optimizer) for listener in self._listeners.all):
            return
        scaler = self._update.script_scaler
        also = 0 if scaler is None else self.scaler_calls.begin(scaler, optimizer)
        if also is not None:
            self.optimizer = ref(optimizer)
            self.made_by = frozenset((number,))
            scale = self._precision.scale.value() if self._precision.scale.checks else None
            self._update.recorder.prepare_advance(self.made_by, scale=scale, num_extras=also)

    def end(self) -> None:
        """Record everything again."""
        self._update.also_made_by(self.made_by)
        self.optimizer = self._last = _nothing
        self.made_by = frozenset()
        self.scaler_calls.end()

    def close(self) -> bool:
        """Close the open update; return False if the full path is needed."""
        if self.optimizer() is None or self._precision.scale.checks or self.scaler_calls.scaler is not None:
            return False
        self._update.recorder.close(skipped=False, scale=None, made_by=self.made_by)
        return True


# --- The calls of a script's own GradScaler in a steady run -----------------------------------------------------------------------

# A step calls a GradScaler three times: ``scale``, ``step`` and ``update``. Outside the steady state each call is checked, wrapped twice
# and recorded, which takes a seventh of a small model's step. In a steady run, the calls go straight to torch. A step then records only
# its unscaled loss (the argument of ``scale``), whether its update was skipped, and the scale after it. A call out of the usual order, a
# skipped update, another optimizer or another scaler ends the steady state; the lint then reads the calls so far from torch's own record
# of them.
#
# A fused optimizer skips its update on the device: its flag is not read, but kept alongside the loss.


class SteadyScaler:
    """The GradScaler of a steady run, and the loss that it scaled last."""

    def __init__(self, steady: Steady, precision: ScriptPrecision, update: OpenUpdate, lint: Lint) -> None:
        self._steady, self._precision, self._open, self._lint = steady, precision, update, lint
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
        if (
            self._precision.effective is not None
            or not isinstance(scaler, GradScaler)
            or not isinstance(scaler._scale, Tensor)
        ):
            return None
        if self._lint.scalers.state_of(scaler) is None:
            return None
        self.scaler = scaler
        self._state = self._lint.gradient_state(optimizer)
        self._skips_on_device = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        return 1 + self._skips_on_device

    def end(self) -> None:
        """Let the calls be recorded in full again."""
        scaler, self.scaler = self.scaler, None
        if scaler is not None:
            self._lint.scalers.catch_up(scaler)

    def take_loss(self) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """Return and forget the loss scaled last, with the previous step's other numbers: the device's flag, if any, and the scale."""
        loss, self.loss, self.scaled = self.loss, None, None
        scale: Any = None if self.scaler is None else self.scaler._scale
        skipped = self._open.skipped
        return loss, (skipped, scale) if isinstance(skipped, Tensor) else (scale,)

    def _scale(self, torch_method: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        open_update = self._open

        @functools.wraps(original)
        def scale(scaler: Any, outputs: Any) -> Any:
            if self.scaler is scaler and type(outputs) is Tensor:
                open_update.scaled_by_script = True
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
                self._steady.end()
            return original(scaler, optimizer)

        return unscale_

    def _step(self, torch_method: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        open_update = self._open

        @functools.wraps(original)
        def step(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self.scaler is not None:
                if (
                    self.scaler is scaler
                    and not open_update.stepped
                    and optimizer is self._steady.optimizer()
                    and not kwargs
                    and (not args or args == (None,))
                    and scaler._per_optimizer_states[id(optimizer)]["stage"] is not OptState.STEPPED
                ):
                    result = torch_method(scaler, optimizer, *args)
                    if open_update.stepped:  # set by the hook before the optimizer's own step
                        self._state.made += 1
                        self._lint.scalers.num_steps += 1
                        if self._skips_on_device:
                            open_update.skipped = self._state.flag = found_on_device(scaler, optimizer)
                    else:
                        self._steady.end()
                        self._lint.scaler_skipped(optimizer)
                        open_update.scaler_stepped(True)
                    return result
                self._steady.end()
            return original(scaler, optimizer, *args, **kwargs)

        return step

    def _update(self, torch_method: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        open_update = self._open

        @functools.wraps(original)
        def update(scaler: Any, new_scale: Any = None) -> Any:
            if self.scaler is scaler:
                if new_scale is None and scaler._per_optimizer_states:
                    open_update.scaled_by_script = False
                    return torch_method(scaler)
                self._steady.end()
            return original(scaler, new_scale)

        return update


def found_on_device(scaler: GradScaler, optimizer: Any) -> Tensor:
    """Return a flag above 0 if ``scaler`` has found non-finite gradients of ``optimizer``, without waiting for the device."""
    found = [*scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()]
    flag: Tensor = sum((other.to(found[0].device) for other in found[1:]), start=found[0])
    return flag
