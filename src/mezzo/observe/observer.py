"""Observe chosen steps of a training run: when observation begins, what belongs to the step, when it ends.

A step is what happens up to an optimizer's update. It is over only when the next backward pass begins, because a
second optimizer may step before that; what ran in between is the next step's forward pass or an evaluation. So an
observer records from the last backward pass of the step before, discards what it recorded whenever that step turns out
not to be over, sets a mark wherever an operation certainly belongs to its own step, and keeps what precedes the last mark.

Compiled code runs eagerly in watched steps: what happens inside compiled kernels belongs to no module.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from mezzo.engine.casting import Casting
from mezzo.engine.scaling import Scale
from mezzo.measure.steps import StepRecorder
from mezzo.observe.skips import Update
from mezzo.policy import Policy
from mezzo.records import AnyRecord, RunRecord


class ObservedRun(Protocol):
    """What an observer may ask of the run that it observes."""

    in_backward: bool
    in_compiled: bool
    compiles: bool
    """Whether the script has called torch.compile."""
    before_compiling: list[Callable[[], Any]]
    """What to do once, before the script first compiles code."""
    inside: str | None
    """Name of the outermost node of the graph that is making a backward pass of its own."""
    device_type: str | None
    recorder: StepRecorder
    scale: Scale
    """The loss scale of the policy."""
    script_scaler: Any
    """The script's own GradScaler, where it is left alone."""
    skips: bool
    """Whether the update that an optimizer is making is one to skip: its gradients are set aside."""
    updates: list[Update]
    """What the update that just closed is made of."""
    recomputing: bool
    """Whether activation checkpointing computes something again."""
    applied: Policy | None
    """The policy as it is applied; None where the script's own precision is left alone."""

    @property
    def roots(self) -> MutableMapping[nn.Module, None]:
        """Return the modules that the script called from outside any module, in order."""
        ...

    @property
    def optimizers(self) -> Iterable[torch.optim.Optimizer]:
        """Return the optimizers that the script made."""
        ...

    @property
    def main_casting(self) -> Casting | None:
        """Return the casting on the device that the script trains on; None where nothing is cast."""
        ...

    @property
    def emulates(self) -> bool:
        """Return whether the policy's formats are emulated on that device."""
        ...


class StopScript(SystemExit):
    """Ends a script after its last observed step; exit code 0, and silent in a thread."""

    def __init__(self) -> None:
        super().__init__(0)


class Observer(ABC):
    """A recorder of chosen steps of a run, which makes a record of them.

    The launcher calls ``backward_begins``, ``backward_ended``, ``compiled_ended``, ``updated`` and ``step_closed``
    while the script runs, then ``close``, then ``record``. A subclass says what happens when observation begins and ends.
    """

    def __init__(self, run: ObservedRun, *, steps: Sequence[int]) -> None:
        self.run = run
        self.watched: list[int] = []
        """Numbers of the steps that were watched to their end."""
        self.forced_eager = False
        """Whether compiled code was run eagerly, so that watched steps ran in another way than the others."""
        self._waiting = sorted(set(steps))
        self._looking: int | None = None
        self._num_closed = 0
        self._eager = False
        self._first: RemovableHandle | None = None

    # --- what an observer does ---------------------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, step: int) -> None:
        """Begin to look, as of now for step number ``step``."""

    @abstractmethod
    def restart(self) -> None:
        """Forget what was seen since ``begin``: it still belonged to the step before."""

    @abstractmethod
    def mark(self) -> None:
        """Record that what was seen until now belongs to the step."""

    @abstractmethod
    def turn(self, step: int) -> None:
        """Keep what lies before the last mark; what lies after it is the beginning of step number ``step``."""

    @abstractmethod
    def end(self) -> None:
        """Stop looking and keep what lies before the last mark."""

    @abstractmethod
    def record(self, run: RunRecord) -> AnyRecord:
        """Return what was found, with the record of the run as a whole."""

    # --- what the launcher calls ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Get ready before the script's first line. Step 1 begins at the first call of a module, in that call's thread."""
        if self._waiting[:1] == [1]:
            self._first = register_module_forward_pre_hook(lambda *_: self._look_from_first_call())

    def backward_begins(self) -> None:  # noqa: B027 - most diagnoses have nothing to do here
        """Record a backward pass that begins."""

    def backward_ended(self) -> None:
        """Record a backward pass that is over; it belongs to its step, whether an update follows or is skipped."""
        self._noted()

    def compiled_ended(self) -> None:
        """Record that a compiled function returned."""
        self._go_on()

    def scaler_met(self, scaler: Any) -> None:  # noqa: B027 - most diagnoses have nothing to do here
        """Record a GradScaler of the script's own that is about to scale a loss."""

    def stepping(self) -> None:  # noqa: B027 - most diagnoses have nothing to do here
        """Record that an optimizer's update begins."""

    def updated(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Record an optimizer's update."""
        self._noted()

    def step_closed(self, num_steps: int) -> None:
        """Record that a step is over. Ends the script after the last watched one."""
        self._num_closed = num_steps
        self._go_on()

    def close(self) -> None:
        """Stop looking, wherever the script ended."""
        self._remove_first()
        if self._looking is not None:
            self._end()

    # --- when ----------------------------------------------------------------------------------------------------------------

    def _noted(self) -> None:
        open_step = self._num_closed + 1
        if self._looking == open_step:
            self.mark()
        elif self._looking == open_step + 1:
            self.restart()
        elif self._looking is None:
            if self._waiting[:1] <= [open_step]:  # it began where no look can begin, as inside compiled code
                self._remove_first()
                self._waiting = [step for step in self._waiting if step > open_step]
            if self._waiting[:1] == [open_step + 1] and self._can_change():
                self._begin()

    def _go_on(self) -> None:
        """End the look if its step is over, and this is a place where modes can be left."""
        if self._looking is None or self._num_closed < self._looking or not self._can_change():
            return
        self.watched.append(self._looking)
        if self._waiting[1:2] == [self._looking + 1]:
            self._waiting = self._waiting[1:]
            self._looking = self._waiting[0]
            self.turn(self._looking)
            return
        self._end()
        if not self._waiting:
            raise StopScript

    def _can_change(self) -> bool:
        # The engine puts back the modes that it found, and so does compiled code, which cannot be told to run eagerly.
        return not (self.run.in_backward or self.run.in_compiled)

    def _look_from_first_call(self) -> None:
        if not torch.compiler.is_compiling():
            self._remove_first()
            self._begin()

    def _remove_first(self) -> None:
        if self._first is not None:
            self._first.remove()
            self._first = None

    def _begin(self) -> None:
        self._looking = self._waiting[0]
        if "torch._dynamo" in sys.modules:
            self.forced_eager = self.forced_eager or self.run.compiles
            torch.compiler.set_stance("force_eager")
            self._eager = True
        self.begin(self._looking)

    def _end(self) -> None:
        self.end()
        self._waiting, self._looking = self._waiting[1:], None
        if self._eager:
            torch.compiler.set_stance("default")
            self._eager = False
