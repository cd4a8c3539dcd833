"""The run of a PyTorch script under a policy: its parts, and the events that concern several of them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn

from mezzo.engine.casts.casting import Casting
from mezzo.engine.gradients import not_finite, total_norm
from mezzo.errors import ScaleFloorError
from mezzo.launch.any_script import ScriptSchedules
from mezzo.launch.request import GuardRequest
from mezzo.launch.torch.notes import Listeners, RunNotes
from mezzo.launch.torch.open_update import OpenUpdate
from mezzo.launch.torch.other_updates import DroppedUpdates, UpdatesByHand
from mezzo.launch.torch.phase import Phase, Root, ScriptGraphs
from mezzo.launch.torch.precision import ScriptPrecision
from mezzo.launch.torch.script_objects import ScriptObjects
from mezzo.launch.torch.steady_state import EVERY_NORM, SteadyState
from mezzo.launch.torch.update_losses import UpdateLosses
from mezzo.launch.training import StepLimit
from mezzo.measure.steps import STEPS_BETWEEN_NORMS
from mezzo.observe.lint.observer import Lint
from mezzo.observe.observer import Update
from mezzo.observe.one_module import OneModule, TorchModule
from mezzo.policy import Policy
from mezzo.records import CheckedContract

if TYPE_CHECKING:
    from mezzo.launch.torch.guarding import ScriptGuard
    from mezzo.observe.tracer import InspectOperation

_GONE = ref(nn.Parameter())  # to a parameter that no longer exists


class TorchRun:
    """A run: what the script trains, in which precision, the update that it is making, and who is notified."""

    def __init__(self, policy: Policy | None) -> None:
        """Begin a run; ``policy`` is None if the script keeps its own precision."""
        self.notes, self.phase, self.objects = RunNotes(), Phase(), ScriptObjects()
        self.precision, self.update, self.listeners = ScriptPrecision(policy, self.notes), OpenUpdate(), Listeners()
        self.lint = Lint(self)
        """The check for misuse of the script's own mixed precision."""
        self.losses = UpdateLosses(self.update, self.objects, end_steady_state=lambda: self.steady_state.end())
        self.steady_state = SteadyState(
            self.precision, self.update, self.objects, self.phase, self.listeners, self.lint, self.losses
        )
        self.graphs = ScriptGraphs(self.precision, self.phase, end_steady_state=self.steady_state.end)
        self.dropped_updates = DroppedUpdates(
            self.precision, self.update, self.objects, self.listeners, self.steady_state
        )
        self.by_hand = UpdatesByHand(self.update, self.objects, self.notes, self.listeners)
        self.limit: StepLimit | None = None  # where to stop the script; None lets it run to its end
        self.guard: ScriptGuard | None = None
        self._lock = threading.Lock()

    def follow_schedules(self, updates_of: Callable[[Any], tuple[int, int]]) -> ScriptSchedules:
        """Let the script's schedulers wait at skipped updates; ``updates_of`` returns the updates that one's optimizer made and skipped."""
        self.schedules = ScriptSchedules(updates_of, on_step=self.lint.scheduled)
        return self.schedules

    def stop_after(self, limit: StepLimit) -> None:
        """Stop the script at ``limit``."""
        self.limit = limit

    def begin_guard(self, request: GuardRequest, *, on_stop: Callable[[], object]) -> ScriptGuard:
        """Watch the recorded numbers for alarms from now on; call ``on_stop`` before the script is stopped."""
        from mezzo.launch.torch.guarding import ScriptGuard

        self.guard = ScriptGuard(self.precision, self.update, self.steady_state, request, on_stop=on_stop)
        return self.guard

    # --- forward ---------------------------------------------------------------------------------------------------------------

    def switched_on(self, module: nn.Module, casting: Casting) -> bool:
        """Return whether a module that is called inside an outermost autocast that is off runs under the policy.

        So it does if the autocast is the script's own switch: the region is on from now until its end.
        """
        switch = self.phase.local.own_switch
        trains = any(p.requires_grad for p in module.parameters())
        if switch is None or self.phase.own_autocast_on or not trains:
            return False
        switch.turn_on(casting)
        self.phase.local.own_switch = None
        return True

    def root_of(self, module: nn.Module, args: Any) -> Root:
        """Record a module called from outside any module; return what its calls need."""
        casting = self.precision.casting(self.record_root(module, args))
        region = None if casting is None else casting.region()
        parameter = next(iter(module.parameters()), None)
        if parameter is None:
            return Root(ref(module), _GONE, None, self.precision.effective, casting, region)
        return Root(ref(module), ref(parameter), parameter.device, self.precision.effective, casting, region)

    def record_root(self, module: nn.Module, args: Any) -> str:
        """Record a module called from outside any module; return the device type that it runs on."""
        parameter = next(iter(module.parameters()), None)
        sample = parameter if parameter is not None else next((a for a in args if isinstance(a, Tensor)), None)
        if sample is None:
            return self.precision.device_type or "cpu"
        with self._lock:  # no other thread may call a module that is only half prepared
            if parameter is not None:
                self.begin_on(parameter.device)
                if module not in self.objects.roots:
                    self.precision.prepare(module, parameter.device)
            self.objects.roots[module] = None
        return sample.device.type

    def begin_on(self, device: torch.device) -> None:
        """Set the device that the script trains on: the first one, or the first that is not a CPU; fixed after the first update."""
        known = self.precision.device_type
        if known == device.type or self.update.recorder.num_closed or (known is not None and device.type == "cpu"):
            return
        self.precision.begin_on(device)
        self.update.recorder.clock.begin_on(device)

    def change_policy(self, policy: Policy, why: str) -> None:
        """Run the rest of the training under ``policy``: the next call of a model begins its region under it."""
        self.steady_state.end()
        device = self.update.recorder.clock.device or torch.device(self.precision.device_type or "cpu")
        value = f"{policy!s} after step {self.update.recorder.num_closed}"
        self.precision.change_to(policy, value, why, device=device, roots=self.objects.roots)

    def begin_transformed(self) -> None:
        """Begin the update of the gradients that ``torch.func`` has returned, as a backward pass would."""
        self.close_update()
        for loss in self.update.take_transformed():
            self.update.recorder.loss(loss)

    # --- updates ---------------------------------------------------------------------------------------------------------------

    def updated(self, norm: Tensor | None, *, finite: bool | None = None) -> bool:
        """Record an update with gradients of this norm; return whether to skip it.

        If the loss is scaled and ``finite`` is None, this reads one flag from the device: the only read of a step.

        Args:
            norm: the norm; None if it was not computed.
            finite: whether the gradients are finite, if that is known.
        """
        # The norm of a step covers all its updates: none where an earlier one was checked without it.
        partial = (
            self.precision.scale.skips_overflows
            and self.update.overflowed is not None
            and not (self.takes_norm or self.update.recorder.has_norm)
        )
        self.evaluated(None if partial else norm)
        if not self.precision.scale.skips_overflows or (norm is None and finite is None):
            return self.update.not_checked()
        return self.update.checked(finite=not not_finite(norm) if norm is not None and finite is None else bool(finite))

    @property
    def takes_norm(self) -> bool:
        """Whether to compute the norm of the open update's gradients even if no check needs it, at 2 to 4% of a small model's step."""
        step = self.update.recorder.num_closed + 1
        return step <= EVERY_NORM or step % STEPS_BETWEEN_NORMS == 0 or self.listeners.observer is not None

    def evaluated(self, norm: Tensor | None) -> None:
        """Record an update with gradients of this norm, without a check."""
        self.precision.check_patterns(self.objects.roots)
        self.update.made(norm)

    def stepping(self) -> None:
        """Notify the observer that an optimizer is about to change the weights."""
        if self.listeners.observer is not None:
            self.listeners.observer.stepping()

    def update_made(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Record the time of a finished update; ``optimizer`` is None if no optimizer object made it."""
        self.update.recorder.updated()
        if optimizer is not None:
            self.steady_state.update_made(optimizer)
            if (number := self.objects.numbers.number(optimizer)) is not None:
                self.update.made_by.add(number)
        for listener in tuple(self.listeners.all):
            listener.updated(optimizer)

    def made_by_hand(self, gradients: list[Tensor]) -> None:
        """Record a pass as an update: the script has no optimizer object."""
        self.by_hand.count_pass()
        if gradients and self.updated(total_norm(gradients)):
            torch._foreach_zero_(gradients)  # so that the script's own update changes nothing
        self.update_made(None)

    def optimizer_created(self, optimizer: torch.optim.Optimizer) -> None:
        """Record an optimizer that the script is about to build; the passes before the first one may have been no training."""
        self.steady_state.end()
        if self.by_hand.were_trials():
            self.dropped_updates.forget()
            self.start_over()
            self.precision.restart_scale(self.update.recorder.clock.device)
            self.listeners.restart()
            if self.guard is not None:
                self.guard.restart()
        self.objects.optimizers[optimizer] = None

    def start_over(self) -> None:
        """Record again from the first step: the steps so far did not belong to the training."""
        self.losses.forget()
        self.update.start_over()

    def script_stepped(self, scaler: Any, optimizer: torch.optim.Optimizer, *, skipped: bool | Tensor) -> None:
        """Record that the script's own GradScaler made or skipped an optimizer's step.

        Args:
            scaler: the GradScaler.
            optimizer: the optimizer.
            skipped: whether the step was skipped; if only the device knows, a tensor that is above 0 if so.
        """
        if self.listeners.observer is None:
            self.update.scaler_stepped(skipped)
            return
        self.update.scaler_stepped(bool(skipped))  # an observer evaluates each skip when it happens
        self.update.parts.append(Update(scaler=id(scaler), optimizer=id(optimizer), skipped=bool(skipped)))

    def record_scaler(self, scaler: Any) -> None:
        """Record that the script's own GradScaler is about to scale a loss."""
        if self.update.scaler_met(scaler):
            self.steady_state.end()
            if self.listeners.observer is not None:
                self.listeners.observer.scaler_met(scaler)

    def close_update(self) -> None:
        """Close the open update, if there is one: all optimizer steps between two backward passes are one update."""
        update, loss_scale = self.update, self.precision.scale
        if not update.stepped or update.in_closure:
            return
        if self.steady_state.close():
            update.closed_in_fast_mode()
            self.check_limit()
            return
        floor_error = None
        scale = update.scale_on_device()
        if loss_scale.skips_overflows:
            floor_error = self.floor_error() if update.skipped and loss_scale.at_floor() else None
            if update.overflowed is not None:
                loss_scale.updated(skipped=update.overflowed)
            scale = loss_scale.value()
            self.dropped_updates.closed(skipped=update.overflowed, scale=scale)
        self.losses.close()
        update.recorder.close(skipped=update.skipped, scale=scale, made_by=self.steady_state.made_by | update.made_by)
        update.closed()
        self.by_hand.step_closed()
        update.begin()
        self.steady_state.begin()
        self.check_limit()
        if floor_error is not None and not (self.guard is not None and self.guard.continues_at_floor):
            raise floor_error

    def repeated_after_leaving_out(self) -> None:
        """Close the update of an earlier pass as skipped if the script left it out because of an overflow, and repeats it now."""
        if self.dropped_updates.pass_begins():
            self.close_update()

    def check_limit(self) -> None:
        """Stop the script after its last requested step, or because of an alarm."""
        if self.guard is not None:
            self.guard.check()
        if self.limit is not None:
            self.limit.check(self.update.recorder.num_closed)

    def scale_states(self) -> list[dict[str, Any]]:
        """Return the states of the loss scales, as they are once the open update is closed."""
        scale = self.precision.scale
        if self.update.stepped and scale.skips_overflows and self.update.overflowed is not None:
            scale = copy.deepcopy(scale)
            scale.updated(skipped=self.update.overflowed)
        return [scale.state_dict(), self.precision.inner_scale.state_dict()]

    def inspection(self, step: int) -> InspectOperation:
        """Return what checks the operations of step number ``step``, for observers."""
        self.lint.operations.begin(step)
        return self.lint.operations.inspect

    def one_module(self, policy: Policy) -> OneModule:
        """Return how a single module runs under ``policy``, for observers."""
        return TorchModule(policy, self.precision.device_type or "cpu", models=list(self.objects.roots))

    def checked_contract(self, *, failed: bool) -> CheckedContract | None:
        """Return what was found of the contract on formats in a run that ``failed`` or not; None without one."""
        return None if self.listeners.contract is None else self.listeners.contract.result(failed=failed)

    def floor_error(self) -> ScaleFloorError:
        """Return the error of gradients that overflow at the scale's floor."""
        return ScaleFloorError(
            f"gradients overflow at the loss scale's floor of {self.precision.scale.value():g}, update {self.update.recorder.num_closed}",
            hint="try --policy bf16, which has FP32's range, or keep modules in FP32 (fp32_modules=...)",
        )
