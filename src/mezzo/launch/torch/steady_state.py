"""Detect when only losses, times and an occasional norm are left to record, and record only those.

The first hundred updates of a script are checked for everything that can go wrong. After that, with one optimizer, most hooks around
each step and backward pass have nothing to do, and finding that out takes a tenth of a small model's step. Anything new in the script
(an optimizer, a GradScaler, compiled code, a session) ends the steady state until another update has been recorded in full. With a loss
scale, a pass that cannot be unscaled in one call (``BatchedUnscaling``) and an update that is skipped or changes the scale are recorded
in full, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.autograd.function import _HookMixin
from torch.optim import Optimizer

from mezzo.engine.gradients import ACCUMULATES, trained_leaves
from mezzo.formats import FP32
from mezzo.launch.patches import Patches
from mezzo.launch.torch.notes import Listeners
from mezzo.launch.torch.open_update import OpenUpdate
from mezzo.launch.torch.phase import Phase
from mezzo.launch.torch.precision import ScriptPrecision
from mezzo.launch.torch.script_objects import ScriptObjects
from mezzo.launch.torch.update_losses import UpdateLosses
from mezzo.observe.lint.gradients import GradientState
from mezzo.observe.lint.observer import Lint
from mezzo.observe.lint.scalers import METHODS

EVERY_NORM = 100
"""First steps whose gradient norms are all computed, even if no loss scale needs them."""


def _nothing() -> None:
    """Return None, as a weak reference to an object that is gone does."""


class SteadyState:
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
        self.scaler_calls = ScalerCalls(self, precision, update, lint)
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
        if self._precision.effective is not None and self._precision.effective.changes_gradients:
            return  # every backward pass has a reduction or a sum to emulate
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
            scale = self._precision.scale.value() if self._precision.scale.skips_overflows else None
            self._update.recorder.prepare_advance(self.made_by, scale=scale, num_extras=also)

    def end(self) -> None:
        """Record everything again."""
        self._update.also_made_by(self.made_by)
        self.optimizer = self._last = _nothing
        self.made_by = frozenset()
        self.scaler_calls.end()

    def close(self) -> bool:
        """Close the open update; return False if the full path is needed."""
        if self.optimizer() is None or self._precision.scale.skips_overflows or self.scaler_calls.scaler is not None:
            return False
        self._update.recorder.close(skipped=False, scale=None, made_by=self.made_by)
        return True


# A step calls a GradScaler three times: ``scale``, ``step`` and ``update``. Outside the steady state each call is checked, wrapped twice
# and recorded, which takes a seventh of a small model's step. In a steady run, the calls go straight to torch. A step then records only
# its unscaled loss (the argument of ``scale``), whether its update was skipped, and the scale after it. A call out of the usual order, a
# skipped update, another optimizer or another scaler ends the steady state; the lint then reads the calls so far from torch's own record
# of them.
#
# A fused optimizer skips its update on the device: its flag is not read, but kept alongside the loss.


class ScalerCalls:
    """The GradScaler of a steady run, and the loss that it scaled last."""

    def __init__(self, steady_state: SteadyState, precision: ScriptPrecision, update: OpenUpdate, lint: Lint) -> None:
        self._steady_state, self._precision, self._open, self._lint = steady_state, precision, update, lint
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
                self._steady_state.end()
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
                    and optimizer is self._steady_state.optimizer()
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
                        self._steady_state.end()
                        self._lint.scaler_skipped(optimizer)
                        open_update.scaler_stepped(True)
                    return result
                self._steady_state.end()
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
                self._steady_state.end()
            return original(scaler, new_scale)

        return update


def found_on_device(scaler: GradScaler, optimizer: Any) -> Tensor:
    """Return a flag above 0 if ``scaler`` has found non-finite gradients of ``optimizer``, without waiting for the device."""
    found = [*scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()]
    flag: Tensor = sum((other.to(found[0].device) for other in found[1:]), start=found[0])
    return flag


# A hook on every leaf (``backward``) costs two kernels and three Python calls per parameter. In a steady run most passes need none: if the
# graph has only torch's own nodes and no hook of the script, no Python code runs before the pass has ended; and if the optimizer's
# parameters had no gradients before, every gradient that the pass leaves is scaled. Then one call multiplies all gradients and sets one
# flag, as in ``torch.amp.GradScaler``. Before the optimizer's step a second call checks the gradients again, since the script may
# have changed them, and the flag is read. Every pass is checked: its graph is walked for its leaves, and a pass that does not qualify
# gets hooks.
# An overflowed gradient stays infinite until then, as under GradScaler; a hook makes it NaN.

_FP32 = FP32.dtype


class BatchedUnscaling:
    """The passes of a steady run whose gradients are unscaled in one call, and the flag of the last one."""

    def __init__(self, precision: ScriptPrecision) -> None:
        self._precision = precision
        self._unhook: Callable[[Tensor], None] = lambda leaf: None
        self._disabled = False
        """Whether the script sets hooks inside graphs, so that its code may run in any backward pass, or retains gradients there."""
        self._known: set[type] = set()
        """Types of graph nodes that run no Python code."""
        self._group: Any = dist.distributed_c10d._world if dist.is_available() else None
        self._overflow: Tensor | None = None
        """A flag that is above 0 if the last pass overflowed; None if that pass was not batched."""
        self._factor_of_1: Tensor | None = None

    def install(self, patches: Patches, unhook: Callable[[Tensor], None]) -> None:
        """Detect hooks on graph nodes until ``patches`` are undone; ``unhook`` removes the launcher's own hook from a leaf."""
        self._unhook = unhook

        def detecting(original: Callable[..., Any]) -> Any:
            def register(*args: Any) -> Any:
                self.disable()
                return original(*args)

            return staticmethod(register)

        patches.replace(_HookMixin, "_register_hook", detecting(_HookMixin._register_hook))

    def disable(self) -> None:
        """Batch no more passes."""
        self._disabled = True

    def forget(self) -> None:
        """Forget the flag: another pass has changed the gradients."""
        self._overflow = None

    def start_of(self, loss: Any, optimizer: torch.optim.Optimizer) -> Tensor | None:
        """Return the scaled gradient from which the backward pass of ``loss`` starts if it can be batched, else None."""
        if self._disabled or (self._group is not None and self._group._default_pg is not None):
            return None
        scale = self._precision.scale.on_device()
        if type(loss) is not Tensor or loss.dim() or loss.dtype is not _FP32 or not isinstance(scale, Tensor):
            return None
        device = scale.device
        if loss.device != device or loss.grad_fn is None:
            return None
        trained = set()  # ids: hashing a tensor is a Python call
        for group in optimizer.param_groups:
            for p in group["params"]:
                if type(p) is not nn.Parameter and type(p) is not Tensor:
                    return None
                if p.grad is not None or p.dtype is not _FP32 or p.device != device:
                    return None
                if p._post_accumulate_grad_hooks or (p._backward_hooks and not self._unhooked(p)):
                    return None
                trained.add(id(p))
        return scale.clone() if self._reaches_only(trained, loss.grad_fn) else None

    def _unhooked(self, leaf: Tensor) -> bool:
        """Remove the launcher's hook from a leaf; return whether no other hook is left."""
        self._unhook(leaf)
        return not leaf._backward_hooks

    def _reaches_only(self, trained: set[int], root: Any) -> bool:
        """Return whether a graph has only nodes of torch, and only leaves whose ids are in ``trained``."""
        waiting, seen, known = [root], {root}, self._known
        while waiting:
            node = waiting.pop()
            kind = type(node)
            if kind is ACCUMULATES:
                if id(node.variable) not in trained:
                    return False
                continue
            if kind not in known:
                if issubclass(kind, torch._C._FunctionBase):  # written in Python
                    return False
                known.add(kind)
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    waiting.append(following)
        return True

    def unscale(self, optimizer: torch.optim.Optimizer, unscale_one: Callable[[Tensor], Tensor]) -> None:
        """Unscale the gradients that a batched pass has left: with ``unscale_one``, one by one, if any has an unusual form."""
        inverse = self._precision.scale.inverse()
        assert inverse is not None
        self._overflow = None
        gradients = _gradients(optimizer, inverse.device)
        if gradients is None or not _are_disjoint(gradients):
            for parameter in trained_leaves(optimizer):
                if parameter.grad is not None:
                    parameter.grad = unscale_one(parameter.grad)
        elif gradients:
            self._overflow = torch.zeros((), dtype=_FP32, device=inverse.device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._overflow, inverse)

    def finite(self, optimizer: torch.optim.Optimizer) -> bool | None:
        """Return whether all gradients are finite, and were after the last pass; None if that pass was not batched.

        Checks them again, since the script may have changed them. Reads one flag from the device.
        """
        flag, self._overflow = self._overflow, None
        if flag is None:
            return None
        gradients = _gradients(optimizer, flag.device)
        if gradients is None:
            return None
        if gradients:
            if self._factor_of_1 is None:
                self._factor_of_1 = torch.ones((), dtype=_FP32, device=flag.device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, self._factor_of_1)
        return not flag


def _gradients(optimizer: torch.optim.Optimizer, device: torch.device) -> list[Tensor] | None:
    """Return the gradients of an optimizer's parameters; None if one is not an FP32 tensor of the usual form on ``device``."""
    gradients = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            g = parameter.grad
            if g is None:
                continue
            if type(g) is not Tensor or g.layout is not torch.strided or g.dtype is not _FP32:
                return None
            if g.device != device or g.requires_grad:
                return None
            gradients.append(g)
    return gradients


def _are_disjoint(gradients: Sequence[Tensor]) -> bool:
    """Return whether gradients share no memory: autograd may leave views of one tensor as the gradients of several leaves."""
    ranges = []
    for gradient in gradients:
        start = gradient.data_ptr()
        ranges.append((start, start + gradient.nbytes))
    ranges.sort()
    last_end = 0
    for start, end in ranges:
        if start < last_end:
            return False
        last_end = end
    return True
