"""The state of a script that runs under a policy, shared by the hooks of this folder."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo.devices import lacks_cuda
from mezzo.engine.casts import conversion
from mezzo.engine.casts.casting import Casting
from mezzo.engine.gradients import not_finite, trained_leaves
from mezzo.engine.matrix_units import fp8_torchao
from mezzo.engine.scaling import NoScale, Scale, scale_for
from mezzo.errors import ScaleFloorError, UnsupportedFormatError
from mezzo.launch.step_limit import StepLimit
from mezzo.launch.torch.applied_policy import for_scripts
from mezzo.launch.torch.counting.script_graphs import ScriptGraphs
from mezzo.launch.torch.cuda_stand_in import CudaStandIn
from mezzo.launch.torch.gradients.update_losses import UpdateLosses
from mezzo.launch.torch.restoring import PremadeOptimizers
from mezzo.launch.torch.steady_state import EVERY_NORM, Steady
from mezzo.launch.torch.thread_state import Root, ThreadState
from mezzo.launch.torch.updates.by_hand import UpdatesByHand
from mezzo.launch.torch.updates.left_out import LeftOutUpdates
from mezzo.launch.torch.updates.owners import OptimizerOwners
from mezzo.measure.steps import STEPS_BETWEEN_NORMS, StepRecorder
from mezzo.observe.lint.observer import Lint
from mezzo.observe.observer import ModuleTree, Observer, Update
from mezzo.observe.one_module import OneModule, TorchModule
from mezzo.policy import Policy
from mezzo.records import Reason

if TYPE_CHECKING:
    from mezzo.launch.schedules import ScriptSchedules
    from mezzo.launch.torch.guarding import ScriptGuard
    from mezzo.launch.torch.models.model_changes import ChangedModels
    from mezzo.observe.tracer import InspectOperation

_OWN_AMP_OFF = Reason(
    what="own autocast",
    value="the script's autocast is off",
    reason="it is for CUDA, which this machine does not have, so the script trains in FP32",
)
_GONE = ref(nn.Parameter())  # to a parameter that no longer exists


class Run:
    """A run's policy, loss scale and steps, and what the policy left alone."""

    measured: Callable[[], list[Reason]] = list
    """Returns what was measured of the policy's effects."""
    on_root_call: Callable[[nn.Module, Any], None] | None = None
    """Called with every module that is called from outside any module, and its arguments; None to call nothing."""
    session_policy: str = ""
    """The policy of the script's own ``mezzo.Session``, if the run leaves it alone."""

    own_16_bits: str = ""
    """The module whose weights the script itself keeps in 16 bits; empty if there is none."""
    schedules: ScriptSchedules
    """The script's schedulers, which wait at skipped updates."""
    compiles = False
    """Whether the script has called torch.compile."""
    own_autocast_on = False
    """Whether the script has turned an outermost autocast on."""
    own_amp_off = False
    """Whether the script has turned autocast on for CUDA, as-is, on a machine without it: torch leaves it off."""
    autocasts_off = False
    """Whether the policy has turned an autocast of the script off, in any thread."""
    in_compiled = False
    """Whether an outermost compiled function is running."""
    not_training = 0
    """Above 0 while passes are no training steps: during a capture, and in torch's own code that runs passes."""

    changed_policy: Reason | None = None  # the policy since the last fallback, and why
    policy_at_start: tuple[Policy | None, bool] | None = None  # before the first fallback, and whether it was emulated

    def __init__(self, policy: Policy | None) -> None:
        """Begin a run; ``policy`` is None if the script keeps its own precision."""
        self.policy = self.current = policy  # the current one until the run falls back to another
        self.applied = None if policy is None else for_scripts(policy)
        self.stand_in = CudaStandIn() if lacks_cuda() else None
        """The CPU in place of CUDA; None if this machine has CUDA."""
        self.recorder = StepRecorder()
        self.scale: Scale = NoScale()
        self.inner_scale: Scale = NoScale()
        """The scale of gradients that the script computes with, as in a penalty."""
        self.device_type: str | None = None
        self.in_backward = False
        self.recomputing = False
        """Whether activation checkpointing is recomputing a forward pass."""
        self.inside: Any = None
        """The emulated graph node that is running a backward pass of its own, if any."""
        self.left_alone: dict[str, Reason] = {}
        # Weak, so that the models of a script that trains one after the other are not all kept.
        self.roots: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
        """Modules called from outside any module, in order."""
        self.optimizers: WeakKeyDictionary[torch.optim.Optimizer, None] = WeakKeyDictionary()
        self.premade = PremadeOptimizers(self.optimizers)
        self.owners, self.local = OptimizerOwners(), ThreadState()
        self.lint = Lint(self)
        """The check for misuse of the script's own mixed precision."""
        self.tree = ModuleTree()
        self.watchers: list[Any] = []
        self.observer: Observer | None = None
        self.limit: StepLimit | None = None  # where to stop the script; None lets it run to its end
        self.guard: ScriptGuard | None = None
        self.changed_models: ChangedModels | None = None
        """What is changed in the script's models besides their precision; None for nothing."""
        self.before_compiling: list[Callable[[], Any]] = []
        """Callbacks to run once, before the script first compiles code with torch.compile."""
        self.script_scaler: Any = None
        """The script's own GradScaler, unless the policy has turned it off."""
        self.scaled_by_script = False
        """Whether losses are currently multiplied by the scale of ``script_scaler``."""
        self._castings: dict[tuple[str, int], Casting] = {}
        self._unmatched = set(() if policy is None else policy.fp32_modules)
        self.in_closure = False
        """Whether an optimizer is calling its closure: the backward passes in it belong to one update."""
        self.skips = False
        """Whether the last update of an optimizer was skipped."""
        self.updates: list[Update] = []
        """The parts of the open update."""
        self.steady = Steady(self)
        self.by_hand, self.left_out, self.graphs = UpdatesByHand(self), LeftOutUpdates(self), ScriptGraphs(self)
        self.losses = UpdateLosses(self)
        self.stepped = False
        """Whether the optimizer of the open update has stepped, so that the next backward pass closes it."""
        self.transformed: list[Tensor] = []
        """Losses whose gradients ``torch.func`` has returned since the optimizer stepped: no backward pass records them."""
        self.made_by: set[int] = set()
        """The numbers of the optimizers that have stepped in the open update."""
        self._cast_by_us = WeakTensorKeyDictionary()
        self._lock = threading.Lock()
        self.overflowed: bool | None = None
        """Whether a gradient of the open update was not finite; None if none was checked."""
        self.open_skipped: bool | Tensor = False
        """Whether the open update was skipped; if only the device knows, a tensor that is above 0 if so."""

    # --- forward ---------------------------------------------------------------------------------------------------------------

    def casting(self, device_type: str) -> Casting | None:
        """Return the policy's casting on a device in this thread, or None if it casts nothing."""
        # A casting caches casts of weights while a region is open: one thread's region must not keep stale ones for another.
        key = (device_type, threading.get_ident())
        casting = self._castings.get(key)
        if casting is None and self.applied is not None and self.applied.lowers:
            casting = self._castings[key] = Casting.of(self.applied, device_type)
        return casting

    def forget_castings(self) -> None:
        """Drop the castings, because ``applied`` has changed; new ones are created when needed."""
        self._castings.clear()
        for module in self.roots:
            self._leave_sparse_embeddings(module)

    @property
    def main_casting(self) -> Casting | None:
        """The casting on the device that the script trains on."""
        return None if self.device_type is None else self.casting(self.device_type)

    @property
    def emulates(self) -> bool:
        """Whether the policy's formats are emulated; False if the device does not support the policy at all."""
        try:
            casting = self.main_casting
        except UnsupportedFormatError:  # the error with which the script's first region ended
            return False
        return casting is not None and casting.emulates

    def switched_on(self, module: nn.Module, casting: Casting) -> bool:
        """Return whether a module that is called inside an outermost autocast that is off runs under the policy.

        So it does if the autocast is the script's own switch: the region is on from now until its end.
        """
        switch = self.local.own_switch
        trains = any(p.requires_grad for p in module.parameters())
        if switch is None or self.own_autocast_on or not trains:
            return False
        switch.turn_on(casting)
        self.local.own_switch = None
        return True

    def root_of(self, module: nn.Module, args: Any) -> Root:
        """Record a module called from outside any module; return what its calls need."""
        casting = self.casting(self.record_root(module, args))
        region = None if casting is None else casting.region()
        parameter = next(iter(module.parameters()), None)
        if parameter is None:
            return Root(ref(module), _GONE, None, self.applied, casting, region)
        return Root(ref(module), ref(parameter), parameter.device, self.applied, casting, region)

    def record_root(self, module: nn.Module, args: Any) -> str:
        """Record a module called from outside any module; return the device type that it runs on."""
        parameter = next(iter(module.parameters()), None)
        sample = parameter if parameter is not None else next((a for a in args if isinstance(a, Tensor)), None)
        if sample is None:
            return self.device_type or "cpu"
        with self._lock:  # no other thread may call a module that is only half prepared
            if parameter is not None:
                self.begin_on(parameter.device)
                if module not in self.roots:
                    self._prepare(module, parameter.device)
            self.roots[module] = None
        return sample.device.type

    def begin_on(self, device: torch.device) -> None:
        """Set the device that the script trains on: the first one, or the first that is not a CPU; fixed after the first update."""
        known = self.device_type
        if known == device.type or self.recorder.num_closed or (known is not None and device.type == "cpu"):
            return
        self.device_type = device.type
        self.recorder.clock.device = device
        if self.applied is not None:
            self.scale = scale_for(self.applied, device, known=True)
            self.inner_scale = scale_for(self.applied, device, known=True)

    def _prepare(self, module: nn.Module, device: torch.device) -> None:
        if self.applied is None:
            return
        self._note_dtypes(module, lowers=self.applied.lowers)
        if not self.applied.lowers:
            return
        self._leave_sparse_embeddings(module)
        policy, matched = self.applied, conversion.matching_patterns(module, self.applied.fp32_modules)
        self._unmatched -= matched
        if len(matched) < len(policy.fp32_modules):
            policy = policy.replace(fp32_modules=tuple(matched))
        self._use_fp8_units(module, policy, device.type)
        if policy.casting == "model":
            conversion.cast_model(module, policy, device.type)
            self._cast_by_us.update(dict.fromkeys(module.parameters()))
        else:
            conversion.keep_fp32(module, policy, device.type)
            if self.policy is not None and self.policy.master_weights:
                conversion.keep_own_norms(module, policy, device.type)

    def _use_fp8_units(self, module: nn.Module, policy: Policy, device_type: str) -> None:
        casting = self.casting(device_type)
        if policy.compute == "fp8" and casting is not None and not casting.emulates:
            fp8_torchao.convert([module], policy)
            for choice in fp8_torchao.layer_choices([module], policy, emulated=False)[1:]:
                self.note_left_alone(choice.what, choice.value, choice.reason)

    def _note_dtypes(self, module: nn.Module, *, lowers: bool) -> None:
        own = [p for p in module.parameters() if p not in self._cast_by_us]
        dtypes = {p.dtype for p in own if p.is_floating_point()}
        name = type(module).__name__
        if lowers and any(p.is_complex() for p in own):
            self.note_left_alone("complex64", name, "its weights are complex, and complex numbers are never cast")
        if lowers and torch.double in dtypes:
            self.note_left_alone("float64", name, "its weights are float64, and float64 is never cast")
        if any(dtype.itemsize == 2 for dtype in dtypes):
            where = conversion.where_16_bits(module, leave_out=self._cast_by_us)
            self.own_16_bits = self.own_16_bits or where
            self.note_left_alone("16-bit weights", where, "the script itself keeps its weights in 16 bits")

    def _leave_sparse_embeddings(self, module: nn.Module) -> None:
        sparse = any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse for m in module.modules())
        if self.applied is not None and sparse and "embedding" in self.applied.lower:
            self.applied = self.applied.replace(lower=tuple(f for f in self.applied.lower if f != "embedding"))
            self._castings.clear()
            why = "torch cannot cast a sparse gradient, so its weight is looked up in FP32"
            self.note_left_alone("sparse embedding", type(module).__name__, why)

    def check_patterns(self) -> None:
        """Raise if a pattern of the policy has matched no module by the time of the first update."""
        if self._unmatched:
            pattern = sorted(self._unmatched)[0]
            names = [n for root in self.roots for n in conversion.module_names(root)]
            raise conversion.no_such_module(pattern, names)

    def note_left_alone(self, what: str, value: str, reason: str) -> None:
        """Record something that the policy left alone."""
        self.left_alone.setdefault(f"{what} {value}", Reason(what=what, value=value, reason=reason))

    def note_own_amp_off(self) -> None:
        """Note that torch leaves the script's autocast off, for want of a CUDA device, and say so the first time."""
        if not self.own_amp_off:
            self.own_amp_off = True
            print(
                f"mezzo: {_OWN_AMP_OFF.value}: {_OWN_AMP_OFF.reason}; --policy fp16 computes as a GPU would",
                file=sys.stderr,
            )

    def surroundings(self) -> list[Reason]:
        """Return what this machine does otherwise than the script says, with reasons."""
        return [
            *(self.stand_in.explanation() if self.stand_in is not None else []),
            *([_OWN_AMP_OFF] if self.own_amp_off else []),
        ]

    def begin_transformed(self) -> None:
        """Begin the update of the gradients that ``torch.func`` has returned, as a backward pass would."""
        self.close_update()
        for loss in self.transformed:
            self.recorder.loss(loss)
        self.transformed = []

    # --- updates ---------------------------------------------------------------------------------------------------------------

    def owns(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether an optimizer of the script trains one of ``parameters``."""
        trained = {id(p) for o in self.optimizers for p in trained_leaves(o)}
        return any(id(p) in trained for p in parameters)

    def updated(self, norm: Tensor | None, *, finite: bool | None = None) -> bool:
        """Record an update with gradients of this norm; return whether to skip it.

        If the loss is scaled and ``finite`` is None, this reads one flag from the device: the only read of a step.

        Args:
            norm: the norm; None if it was not computed.
            finite: whether the gradients are finite, if that is known.
        """
        # The norm of a step is that of all its updates: none where an earlier one was checked without it.
        partial = self.scale.checks and self.overflowed is not None and not (self.takes_norm or self.recorder.has_norm)
        self.evaluated(None if partial else norm)
        self.skips = False
        if self.scale.checks and (norm is not None or finite is not None):
            self.skips = bool(not_finite(norm)) if norm is not None and finite is None else not finite
            self.overflowed = self.skips or bool(self.overflowed)
            self.open_skipped = self.open_skipped or self.skips
        return self.skips

    @property
    def takes_norm(self) -> bool:
        """Whether to compute the norm of the open update's gradients even if no check needs it, at 2 to 4% of a small model's step."""
        step = self.recorder.num_closed + 1
        return step <= EVERY_NORM or step % STEPS_BETWEEN_NORMS == 0 or self.observer is not None

    @property
    def num_updates(self) -> int:
        """The number of updates, including the open one."""
        return self.recorder.num_closed + self.stepped

    def evaluated(self, norm: Tensor | None) -> None:
        """Record an update with gradients of this norm, without a check."""
        if self._unmatched:
            self.check_patterns()
        self.stepped = True
        if norm is not None:
            self.recorder.norm(norm)

    def stepping(self) -> None:
        """Notify the observer that an optimizer is about to change the weights."""
        if self.observer is not None:
            self.observer.stepping()

    def update_made(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Record the time of a finished update; ``optimizer`` is None if no optimizer object made it."""
        self.recorder.updated()
        if optimizer is not None:
            self.steady.update_made(optimizer)
            if (number := self.owners.number(optimizer)) is not None:
                self.made_by.add(number)
        for watcher in tuple(self.watchers):
            watcher.updated(optimizer)

    def script_stepped(self, scaler: Any, optimizer: torch.optim.Optimizer, *, skipped: bool | Tensor) -> None:
        """Record that the script's own GradScaler made or skipped an optimizer's step.

        Args:
            scaler: the GradScaler.
            optimizer: the optimizer.
            skipped: whether the step was skipped; if only the device knows, a tensor that is above 0 if so.
        """
        if self.observer is not None:  # an observer evaluates each skip when it happens
            skipped = bool(skipped)
        if isinstance(skipped, Tensor):
            self.stepped = True
            if isinstance(self.open_skipped, Tensor):
                self.open_skipped = self.open_skipped + skipped.to(self.open_skipped.device)
            else:
                self.open_skipped = self.open_skipped or skipped
        elif skipped:
            self.stepped = self.open_skipped = True
        if self.observer is not None:
            self.updates.append(Update(scaler=id(scaler), optimizer=id(optimizer), skipped=bool(skipped)))

    def record_scaler(self, scaler: Any) -> None:
        """Record that the script's own GradScaler is about to scale a loss."""
        if self.script_scaler is not scaler:
            self.steady.end()
            self.script_scaler = scaler
            if self.observer is not None:
                self.observer.scaler_met(scaler)
        self.scaled_by_script = True

    def close_update(self) -> None:
        """Close the open update, if there is one: all optimizer steps between two backward passes are one update."""
        if not self.stepped or self.in_closure:
            return
        if self.steady.close():
            self.stepped = False
            self.made_by.clear()
            self.check_limit()
            return
        floor_error = None
        scale = None if self.script_scaler is None else scale_on_device(self.script_scaler)
        if self.scale.checks:
            floor_error = self.floor_error() if self.open_skipped and self.scale.at_floor() else None
            if self.overflowed is not None:
                self.scale.updated(skipped=self.overflowed)
            scale = self.scale.value()
            self.left_out.closed(skipped=self.overflowed, scale=scale)
        self.losses.close()
        self.recorder.close(skipped=self.open_skipped, scale=scale, made_by=self.steady.made_by | self.made_by)
        self.stepped, self.overflowed, self.open_skipped = False, None, False
        self.made_by.clear()
        self.by_hand.step_closed()
        self.updates = []
        self.steady.begin()
        self.check_limit()
        if floor_error is not None and not (self.guard is not None and self.guard.continues_at_floor):
            raise floor_error

    def check_limit(self) -> None:
        """Stop the script after its last requested step, or because of an alarm."""
        if self.guard is not None:
            self.guard.check()
        if self.limit is not None:
            self.limit.check(self.recorder.num_closed)

    def scale_states(self) -> list[dict[str, Any]]:
        """Return the states of the loss scales, as they are once the open update is closed."""
        scale = self.scale
        if self.stepped and scale.checks and self.overflowed is not None:
            scale = copy.deepcopy(scale)
            scale.updated(skipped=self.overflowed)
        return [scale.state_dict(), self.inner_scale.state_dict()]

    @property
    def gradient_scale(self) -> float:
        """The loss scale that is still in the gradients: that of the script's own scaler, since the policy's is divided out immediately."""
        return 1.0 if self.script_scaler is None else float(self.script_scaler.get_scale())

    def inspection(self, step: int) -> InspectOperation:
        """Return what checks the operations of step number ``step``, for observers."""
        self.lint.operations.begin(step)
        return self.lint.operations.inspect

    def one_module(self, policy: Policy) -> OneModule:
        """Return how a single module runs under ``policy``, for observers."""
        return TorchModule(policy, self.device_type or "cpu")

    def floor_error(self) -> ScaleFloorError:
        """Return the error of gradients that overflow at the scale's floor."""
        return ScaleFloorError(
            f"gradients overflow at the loss scale's floor of {self.scale.value():g}, update {self.recorder.num_closed}",
            hint="try --policy bf16, which has FP32's range, or keep modules in FP32 (fp32_modules=...)",
        )


def scale_on_device(scaler: Any) -> Tensor | float:
    """Return the scale of a script's GradScaler without waiting for the device, if the scale is on it."""
    on_device = getattr(scaler, "_scale", None)
    scale: Tensor | float = on_device if isinstance(on_device, Tensor) else scaler.get_scale()
    return scale
