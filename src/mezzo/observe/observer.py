"""Observe chosen steps of a training run: when observation begins, which operations belong to the step, when it ends.

A step ends with an optimizer's update, but that is known only when the next backward pass begins: a second optimizer may step
before it, and the operations in between are the next step's forward pass or an evaluation. So an observer records from the last
backward pass of the step before, and discards that record if the earlier step turns out to continue. It sets a mark whenever the
operations so far certainly belong to its own step, and at the end keeps everything before the last mark.

Compiled code runs eagerly in observed steps: operations inside compiled kernels belong to no module.
"""

from __future__ import annotations

import re
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from mezzo.engine.casts.casting import Casting
from mezzo.engine.casts.conversion import in_fp32, module_names, wrap
from mezzo.engine.scaling import Scale
from mezzo.measure.flops import Counted, effective
from mezzo.measure.steps import StepRecorder
from mezzo.observe.one_module import OneModule
from mezzo.observe.settings import StopScript
from mezzo.policy import Policy
from mezzo.records import AnyRecord, CheckedContract, RunRecord

if TYPE_CHECKING:
    from mezzo.observe.tracer import InspectOperation, Tracer

_WRAPPERS = re.compile(r"^((_orig_mod|module)\.)+")


class ModuleTree:
    """The modules inside a model, as PyTorch knows them; a framework on top of PyTorch may know them by other names."""

    def title(self, root: nn.Module) -> str:
        """Return the name of a model."""
        return type(root).__name__

    def modules(self, root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield every module with its path, which is empty for ``root`` and for wrappers around it."""
        for path, module in root.named_modules():
            yield _WRAPPERS.sub("", f"{path}.").rstrip("."), module

    def named(self, root: nn.Module) -> dict[str, nn.Module]:
        """Return the modules inside ``root`` by the names that ``fp32_modules`` patterns are matched with."""
        return module_names(root)

    def parameters(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of ``module`` itself, not of modules inside it, with their names."""
        yield from module.named_parameters(recurse=False)

    def keep_fp32(self, module: nn.Module, device_type: str) -> None:
        """Make ``module`` compute in FP32 from its next call on."""
        wrap(module, in_fp32, device_type)


class Update(NamedTuple):
    """The part of an update that one optimizer makes."""

    scaler: int
    """Identity of the GradScaler; 0 for the policy's loss scale."""
    optimizer: int
    skipped: bool


class ObservedPhase(Protocol):
    """What the script is doing at the moment."""

    in_backward: bool
    in_compiled: bool
    compiles: bool
    """Whether the script has called torch.compile."""
    before_compiling: list[Callable[[], Any]]
    """Callbacks to run once, before the script first compiles code."""
    inside: Any
    """The emulated graph node that is running a backward pass of its own, if any."""
    recomputing: bool
    """Whether activation checkpointing is recomputing a forward pass."""

    def as_in_backward(self) -> AbstractContextManager[None]:
        """Run code that the launcher ignores, as if in a backward pass."""


class ObservedUpdate(Protocol):
    """The update that the script is making."""

    recorder: StepRecorder
    script_scaler: Any
    """The script's own GradScaler, if the run leaves it alone."""
    skips: bool
    """Whether the current update is skipped: its gradients are set aside while the optimizer steps."""
    parts: list[Update]
    """The parts of the update that just closed."""

    @property
    def gradient_scale(self) -> float:
        """The loss scale by which the parameters' gradients are still multiplied after a backward pass; waits for the device."""

    def skip(self) -> None:
        """Let the optimizer that is about to step leave its step out."""


class ObservedPrecision(Protocol):
    """The policy and its loss scale."""

    device_type: str | None
    scale: Scale
    """The loss scale of the policy."""
    effective: Policy | None
    """The policy as applied by autocast; None if the script keeps its own precision, or its framework lowers it."""

    @property
    def main_casting(self) -> Casting | None:
        """The casting on the device that the script trains on; None if nothing is cast."""

    @property
    def emulates(self) -> bool:
        """Whether the policy's formats are emulated on that device."""


class ObservedObjects(Protocol):
    """The models and optimizers that the script trains."""

    tree: ModuleTree
    """The modules of the script's models by name."""

    @property
    def roots(self) -> MutableMapping[nn.Module, None]:
        """The modules called from outside any module, in order of their first call."""

    @property
    def optimizers(self) -> Iterable[torch.optim.Optimizer]:
        """The optimizers that the script created."""


class ObservedNotes(Protocol):
    """What the record says besides."""

    session_policy: str
    """The policy of the script's own ``mezzo.Session``, if the run leaves it alone; empty without one."""


class ObservedRun(Protocol):
    """The part of a run that an observer may use."""

    @property
    def phase(self) -> ObservedPhase:
        """What the script is doing at the moment."""

    @property
    def update(self) -> ObservedUpdate:
        """The update that the script is making."""

    @property
    def precision(self) -> ObservedPrecision:
        """The policy and its loss scale."""

    @property
    def objects(self) -> ObservedObjects:
        """The models and optimizers that the script trains."""

    @property
    def notes(self) -> ObservedNotes:
        """What the record says besides."""

    def inspection(self, step: int) -> InspectOperation | None:
        """Return what checks the operations of step number ``step`` for misuse of mixed precision; None for nothing."""

    def one_module(self, policy: Policy) -> OneModule:
        """Return how a single module runs under ``policy``."""

    def checked_contract(self, *, failed: bool) -> CheckedContract | None:
        """Return what was found of the contract on formats in a run that ``failed`` or not; None without one."""


class Observer(ABC):
    """A recorder of chosen steps of a run.

    The launcher calls ``backward_begins``, ``backward_ended``, ``compiled_ended``, ``updated`` and ``step_closed``
    while the script runs, then ``close``, then ``record``. A subclass defines what happens when observation begins and ends.
    """

    def __init__(self, run: ObservedRun, *, steps: Sequence[int], ends_script: bool = True) -> None:
        """Observe ``steps`` of ``run``; ``ends_script``: end the script after the last of them."""
        self.run = run
        self._ends_script = ends_script
        self.watched: list[int] = []
        """Numbers of the steps that were observed until they ended."""
        self.forced_eager = False
        """Whether compiled code ran eagerly, so that observed steps differ from the others."""
        self._tracer: Tracer | None = None
        """Records the operations of the observed step; None between observed steps, and where only values are recorded."""
        self._waiting = sorted(set(steps))
        self._observing: int | None = None
        self._num_closed = 0
        self._eager: Any = None
        """The stance in which compiled code runs eagerly, over the script's own; None while it runs compiled."""
        self._first_call: RemovableHandle | None = None
        self._thread = 0
        """The thread in which observation began at the first call of a module."""

    # --- what an observer does ---------------------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, step: int) -> None:
        """Begin to observe, for now as step number ``step``."""

    def move(self, step: int) -> None:
        """Discard the record of another thread, and begin in this one."""
        self.begin(step)

    @abstractmethod
    def restart(self) -> None:
        """Discard what was recorded since ``begin``: it still belonged to the previous step."""

    @abstractmethod
    def mark(self) -> None:
        """Mark everything recorded so far as belonging to the step."""

    @abstractmethod
    def turn(self, step: int) -> None:
        """Keep everything before the last mark; the rest belongs to step number ``step``."""

    @abstractmethod
    def end(self) -> None:
        """Stop observing and keep everything before the last mark."""

    def profile_begins(self, profile: object) -> None:  # noqa: B027 - most observers do nothing here
        """Record that the script is about to begin a profile of torch's profiler."""

    def profile_ended(self, profile: object) -> None:  # noqa: B027 - most observers do nothing here
        """Record that a profile has ended."""

    def failed(self, error: BaseException) -> None:  # noqa: B027
        """Note the error that ended the script."""

    @abstractmethod
    def record(self, run: RunRecord) -> AnyRecord:
        """Return the observer's record, which includes the whole run's."""

    # --- what the launcher calls ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Prepare before the script's first line. Step 1 begins at the first call of a module, in that call's thread."""
        if self._waiting[:1] == [1]:
            self._first_call = register_module_forward_pre_hook(self._first_called)

    def _first_called(self, module: nn.Module, args: object) -> None:
        self._begin_at_first_call()

    def autocast_entered(self, *, off: bool, in_module: bool) -> Any:  # noqa: B027 - most observers have nothing to do here
        """Record that the script enters an autocast region; the result is passed to ``autocast_left``.

        Args:
            off: whether the script itself turns autocast off there.
            in_module: whether a module is running.
        """

    def autocast_left(self, entered: Any) -> None:  # noqa: B027 - most observers have nothing to do here
        """Record that the script leaves an autocast region."""

    def backward_begins(self, losses: Sequence[Tensor]) -> None:  # noqa: B027 - most observers have nothing to do here
        """Record that a backward pass of ``losses`` begins."""

    def backward_ended(self) -> None:
        """Record that a backward pass ended; it belongs to its step whether or not the update is skipped."""
        self._advance()

    def compiled_ended(self) -> None:
        """Record that a compiled function returned."""
        self._end_if_over()

    def loss_scale(self) -> float:
        """Return the current loss scale, of the policy or of the script; waits for the device."""
        scaler = self.run.update.script_scaler
        return float(scaler.get_scale()) if scaler is not None else self.run.precision.scale.value()

    def scaler_met(self, scaler: Any) -> None:  # noqa: B027 - most observers have nothing to do here
        """Record that the script's own GradScaler is about to scale a loss."""

    def optimizer_created(self) -> None:  # noqa: B027 - most observers have nothing to do here
        """Record that the script creates its first optimizer: earlier forward passes belong to a step only if their gradients do."""

    def steps_discarded(self) -> None:  # noqa: B027 - a new observer has seen nothing
        """Record that the steps so far were no training steps."""

    def stepping(self) -> None:
        """Record that an optimizer's update begins: the following operations belong to it."""
        if self._tracer is not None:
            self._tracer.stepping(True)

    def updated(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Record an optimizer's update."""
        self.update_ended()
        self._advance()

    def update_ended(self) -> None:
        """Record that the operations of an optimizer's update are over."""
        if self._tracer is not None:
            self._tracer.stepping(False)

    def step_closed(self, num_steps: int) -> None:
        """Record that a step is over; end the script after the last observed one."""
        self._num_closed = num_steps
        self._end_if_over()

    @property
    def compiles(self) -> bool:
        """Whether the script compiles code, which hides single operations."""
        return self.run.phase.compiles

    @property
    def over(self) -> bool:
        """Whether nothing is left to observe, and the script goes on."""
        return not (self._ends_script or self._waiting) and self._observing is None

    def too_short(self) -> bool:
        """Return whether the script ended before its first observed step did."""
        return not self.watched

    def close(self) -> None:
        """Stop observing, wherever the script ended."""
        self._remove_first_call()
        if self._observing is not None:
            self._end()

    def with_formats(self, run: RunRecord, counted: Counted) -> RunRecord:
        """Return ``run`` with the formats that were counted in inspected steps, if any step was inspected."""
        if counted.step is None:
            return run
        formats = effective(
            counted, self.run.precision.effective, emulates=self.run.precision.emulates, uncounted=run.effective
        )
        return run.model_copy(update={"effective": formats})

    # --- when observation begins and ends ------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        open_step = self._num_closed + 1
        if self._observing == open_step:
            self._remove_first_call()
            self.mark()
        elif self._observing == open_step + 1:
            self.restart()
        elif self._observing is None:
            if self._waiting[:1] <= [open_step]:  # it began where modes cannot be entered, such as inside compiled code
                self._remove_first_call()
                self._waiting = [step for step in self._waiting if step > open_step]
            if self._waiting[:1] == [open_step + 1] and self.can_switch_modes():
                self._begin()

    def _end_if_over(self) -> None:
        """End the observation if its step is over and modes can be left here."""
        if self._observing is None or self._num_closed < self._observing or not self.can_switch_modes():
            return
        self.watched.append(self._observing)
        if self._waiting[1:2] == [self._observing + 1]:
            self._waiting = self._waiting[1:]
            self._observing = self._waiting[0]
            self.turn(self._observing)
            return
        self._end()
        if not self._waiting and self._ends_script:
            raise StopScript

    def can_switch_modes(self) -> bool:
        """Return whether observation can begin or end here."""
        # Autograd and compiled code restore the modes that were on before; compiled code cannot switch to eager half-way either.
        return not (self.run.phase.in_backward or self.run.phase.in_compiled)

    def _begin_immediately(self) -> None:
        """Begin before the script's first line; code that the script compiles later runs eagerly while observation lasts."""
        self.run.phase.before_compiling.append(self._eager_from_here)
        self._begin()

    def _eager_from_here(self) -> None:
        if self._observing is not None:
            self.forced_eager = True
            self._run_eagerly()

    def _run_eagerly(self) -> None:
        """Let compiled code run eagerly. Only one stance is set, because only one is undone at the end."""
        if self._eager is None:
            self._eager = torch.compiler.set_stance("force_eager")

    def _begin_at_first_call(self) -> bool:
        """Begin at the first call of a module, and again at the first call with gradients in another thread.

        A thread that only evaluates calls modules without gradients. Its operations belong to no step, and whether its call
        comes first varies from run to run.
        """
        if torch.compiler.is_compiling():
            return False
        thread = threading.get_ident()
        if self._observing is None:
            self._thread = thread
            self._begin()
            return True
        if thread == self._thread or not torch.is_grad_enabled() or not self.can_switch_modes():
            return False
        self._remove_first_call()
        self.move(self._observing)
        return True

    def _remove_first_call(self) -> None:
        if self._first_call is not None:
            self._first_call.remove()
            self._first_call = None

    def _begin(self) -> None:
        self._observing = self._waiting[0]
        if "torch._dynamo" in sys.modules:
            self.forced_eager = self.forced_eager or self.run.phase.compiles
            self._run_eagerly()
        self.begin(self._observing)

    def _end(self) -> None:
        self._remove_first_call()
        self.end()
        self._waiting, self._observing = self._waiting[1:], None
        if self._eager is not None:
            self._eager.__exit__(None, None, None)
            self._eager = None


class TracingObserver(Observer):
    """An observer that traces every operation, from inside the first call of a module on."""

    def move(self, step: int) -> None:
        """Begin again in the thread that trains."""
        assert self._tracer is not None
        self._tracer.leave_behind()
        self.begin(step)

    def _first_called(self, module: nn.Module, args: object) -> None:
        if self._begin_at_first_call() and self._tracer is not None:
            self._tracer.enter(module, args)
