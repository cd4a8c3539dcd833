"""Find the first value of a training run that is not finite, at little cost until there is one.

After every step two flags are read: is the loss finite, are the gradients. Operations are looked at in chosen steps only
(``mezzo.diagnosis.infinities``). A step that was not finite and was not looked at is a suspect: the script is run again
with that step among the chosen ones, or, where it cannot be, every step is chosen.

A skipped update is no fault where the loss scale is being found: a dynamic scale begins too high on purpose and halves
until the gradients fit. So a step that overflows because of its scale alone counts as a fault only if the scale does
not find its way: it is static, or ``PATIENCE`` updates in a row were skipped, or every step of the script was.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from mezzo.diagnosis import processes
from mezzo.diagnosis.infinities import InfinityTracer, Source
from mezzo.diagnosis.names import Names
from mezzo.diagnosis.settings import DiagnoseSettings
from mezzo.diagnosis.verdicts import Fault, judged, located, verdict_record
from mezzo.diagnosis.watching import Diagnosis, Running, Watched
from mezzo.engine.scaling import DynamicScale, StaticScale
from mezzo.measure.flops import OperandFormats
from mezzo.records import DiagnoseRecord, RunRecord

PATIENCE = 8
"""Updates in a row that a dynamic loss scale may skip: from 65536 down to 256."""


@dataclass
class _Look:
    """Hold what was seen of one step's operations."""

    sources: list[Source]
    lost: list[Source]
    """What the loss came from, where it was not finite."""
    in_backward: list[Source]


@dataclass
class _Late:
    """Hold the flags of a step on their way from the device."""

    step: int
    flags: Tensor
    skipped: bool
    arrived: torch.cuda.Event


class NonFinite(Diagnosis):
    """Watch a run for values that are not finite."""

    def __init__(self, settings: DiagnoseSettings, run: Running) -> None:
        super().__init__(run, steps=settings.steps)
        self._until = settings.steps[-1]
        self._lowers_scale = settings.scale_one
        self._lowering: RemovableHandle | None = None
        self._unfinished: _Look | None = None
        """What was seen of a step that never ended."""
        self._met = False
        """Whether every suspect was met again."""
        self._suspects = list(settings.suspects)
        self._tracer: InfinityTracer | None = None
        self._marked = 0
        self._look: _Look | None = None
        self._late: _Late | None = None
        self._thread = 0
        self._in_row = 0
        self.bad_steps: list[int] = []
        self.faults: list[Fault] = []
        """What was located, by step."""
        self._scale_faults: list[Fault] = []
        self._gave_up = False
        self._elsewhere: tuple[int, dict[str, object] | None] = (-1, None)
        """The rank of the process that found a fault, and what it found."""
        self._lost: int | None = None
        """The step whose loss was not finite."""

    # --- the look --------------------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Enter the tracer."""
        formats = OperandFormats(inside=lambda: self.run.inside)
        device_type = self.run.device_type or "cpu"
        self._tracer = InfinityTracer(
            formats, device_type=device_type, flags=self.run, scale=self._loss_scale, weights=self._weights
        )
        self._marked = 0
        self._tracer.start()
        self._thread = threading.get_ident()
        if self._lowers_scale:  # not now: the step before may still have to divide by its own
            self._lowering = register_module_forward_pre_hook(lambda *_: self._lower_scale())

    def restart(self) -> None:
        """Forget what was seen."""
        assert self._tracer is not None
        self._tracer.forget()

    def mark(self) -> None:
        """Take note that what was seen until now belongs to the step."""
        assert self._tracer is not None
        self._marked = len(self._tracer.trace.operations)

    def turn(self, step: int) -> None:
        """Keep the step and go on with the next one."""
        assert self._tracer is not None
        self._look = _seen(self._tracer, self._marked)
        self._tracer.keep_after(self._marked)
        self._marked = 0

    def end(self) -> None:
        """Leave the tracer and keep the step."""
        assert self._tracer is not None
        if self._thread == threading.get_ident():
            self._tracer.stop()
        else:  # a script that trained in a thread has ended
            self._tracer.leave_behind()
        finished = self._looking is not None and self._num_closed >= self._looking
        self._look = _seen(self._tracer, self._marked if finished else len(self._tracer.trace.operations))

    def start(self) -> None:
        """Get ready; a look at step 1 begins inside the first call of a module, which has to be known."""
        if self._waiting[:1] == [1]:
            self._first = register_module_forward_pre_hook(self._first_called)

    def _first_called(self, module: nn.Module, args: object) -> None:
        self._look_from_first_call()
        if self._tracer is not None:
            self._tracer.enter(module, args)

    def backward_begins(self) -> None:
        """Lower the policy's loss scale where that was asked for: the step before has closed by now."""
        if self._lowers_scale and self._looking is not None:
            self.run.scale.load_state_dict({"scale": 1.0})

    # --- steps -----------------------------------------------------------------------------------------------------------------

    def step_closed(self, num_steps: int) -> None:
        """Judge the step that is over; end the script where enough is known."""
        self._look = None
        over = False
        try:
            super().step_closed(num_steps)
        except Watched:
            over = True
        self._judge(num_steps)
        if processes.several() and self._together(over):
            raise Watched
        if over or self.faults or self._gave_up or self._met:
            raise Watched

    def _together(self, over: bool) -> bool:
        """Return whether any process is at its end; take its fault over where this one has none."""
        if not processes.any_process(over or bool(self.faults) or self._gave_up, self.run.device_type or "cpu"):
            return False
        own = self.faults[0] if self.faults else None
        found = None if own is None else located(own, own_scaler=self._own_scaler, as_is=self.run.applied is None)
        self._elsewhere = processes.first_of_all(found)
        return True

    @property
    def _own_scaler(self) -> bool:
        return self.run.script_scaler is not None

    def close(self) -> None:
        """Stop looking, wherever the script ended, and judge what was seen of a step that never ended."""
        self._look = None
        late, self._late = self._late, None
        if late is not None:
            late.arrived.synchronize()
            self._decide(late.step, late.flags, skipped=late.skipped)
        super().close()
        if self._look is not None and not self.faults and self._num_closed + 1 not in self.watched:
            self._unfinished = self._look

    def _judge(self, step: int) -> None:
        flags, skipped = self.run.recorder.finite_flags(), self.run.recorder.last_skipped()
        late, self._late = self._late, None
        if late is not None:
            late.arrived.synchronize()
            self._decide(late.step, late.flags, skipped=late.skipped)
        if self._look is None and flags.device.type == "cuda":
            # Read at the next step's end: by then it has long been copied, and nobody waits.
            arrived = torch.cuda.Event()
            copied = flags.to("cpu", non_blocking=True)
            arrived.record(torch.cuda.current_stream(flags.device))
            self._late = _Late(step, copied, skipped, arrived)
            return
        self._decide(step, flags, skipped=skipped)

    def _decide(self, step: int, flags: Tensor, *, skipped: bool) -> None:
        loss_finite, gradients_finite = (bool(f) for f in flags.tolist())
        bad = not (loss_finite and gradients_finite) or skipped
        look, fault = (self._look, None) if step == self._num_closed else (None, None)
        if look is not None:
            names = Names([*self.run.roots, *(self._tracer.trace.roots if self._tracer is not None else ())])
            fault = _fault(look, step, names, loss_bad=not loss_finite, bad=bad)
        self._count(step, bad=bad, loss_bad=not loss_finite, fault=fault)
        if self._suspects and step == self._suspects[0]:
            self._suspects.pop(0)
            self._met = not self._suspects and (bad or fault is not None)
            if not bad and fault is None:  # the script went another way this time: look at all that follows
                self._suspects = []
                self._waiting = list(range(max(step + 1, self._waiting[0] if self._looking else 0), self._until + 1))

    def _count(self, step: int, *, bad: bool, loss_bad: bool, fault: Fault | None) -> None:
        if fault is not None and fault.verdict != "scale_overflow":
            self.faults.append(fault)
        if not bad:
            self._in_row = 0
            return
        self.bad_steps.append(step)
        if fault is not None and fault.verdict == "scale_overflow":
            self._scale_faults.append(fault)
        self._in_row += 1
        self._lost = step if loss_bad else None
        scaled = self.run.scale.checks or self.run.script_scaler is not None
        self._gave_up = loss_bad or not scaled or self._loss_scale_is_static() or self._in_row > PATIENCE

    def _lower_scale(self) -> None:
        if self._lowering is not None:
            self._lowering.remove()
            self._lowering = None
        scaler = self.run.script_scaler
        if scaler is not None:
            scaler.load_state_dict({**scaler.state_dict(), "scale": 1.0})

    def _weights(self) -> list[Tensor]:
        return [p for optimizer in self.run.optimizers for group in optimizer.param_groups for p in group["params"]]

    def _loss_scale(self) -> float:
        scaler = self.run.script_scaler
        return float(scaler.get_scale()) if scaler is not None else self.run.scale.value()

    def _loss_scale_is_static(self) -> bool:
        return isinstance(self.run.scale, StaticScale) and not isinstance(self.run.scale, DynamicScale)

    # --- the record ------------------------------------------------------------------------------------------------------------------

    def record(self, run: RunRecord) -> DiagnoseRecord:
        """Return what was found."""
        faults = list(self.faults)
        if not faults and run.error is not None and self._unfinished is not None:
            step = len(run.steps) + 1
            tracer = self._tracer
            names = Names([*self.run.roots, *(tracer.trace.roots if tracer is not None else ())])
            found = _fault(self._unfinished, step, names, loss_bad=True, bad=True)
            faults = [] if found is None else [found]
        lasting = bool(self.bad_steps) and (self._gave_up or len(self.bad_steps) == len(run.steps))
        if not faults and lasting and self._lost is None:
            faults = self._scale_faults[:1]
        suspect = list(self.bad_steps)
        if not faults and run.error is not None and run.exit_code and not suspect:
            suspect = [len(run.steps) + 1]
        return verdict_record(
            run,
            fault=faults[0] if faults else None,
            bad_steps=suspect,
            watched=[*self.watched, len(run.steps) + 1] if self._unfinished is not None and faults else self.watched,
            unlocated=(self._lost or self.bad_steps[0]) if lasting else None,
            forced_eager=self.forced_eager,
            scaled=self.run.scale.checks or self.run.script_scaler is not None,
            own_scaler=self._own_scaler,
            elsewhere=self._elsewhere,
        )


def _seen(tracer: InfinityTracer, marked: int) -> _Look:
    """Return what lies before the mark."""
    sources = [s for s in tracer.sources if s.index < marked]
    spoiled = [s for s in tracer.spoiled if s.index < marked]
    lost: list[Source] = []
    operations = tracer.trace.operations
    for seen in spoiled:
        later = next((s for s in spoiled if s.index > seen.index and not s.backward), None)
        if not seen.backward and (later is None or _backward_between(operations, seen.index, later.index)):
            lost += seen.sources
    backward = [s for seen in spoiled if seen.backward for s in seen.sources]
    return _Look(sources, list(dict.fromkeys(lost)), list(dict.fromkeys(backward)))


def _backward_between(operations: list[tuple[object, ...]], first: int, last: int) -> bool:
    return any(noted[2] is not None for noted in operations[first:last])


def _fault(look: _Look, step: int, names: Names, *, loss_bad: bool, bad: bool) -> Fault | None:
    """Return the source that is to blame for a step, with its verdict; None where there is none."""
    silent = next(filter(_is_silent, look.sources), None)
    quiet = None if silent is None else judged(silent, step, names, silent=True)
    if not bad:
        return quiet
    suspects = look.lost if loss_bad and look.lost else look.in_backward
    blamed = [s for s in suspects if s.kind != "constant"] or suspects
    source = min(blamed, key=lambda s: s.index, default=None)
    loud = None if source is None else judged(source, step, names)
    return quiet if quiet is not None and loud is not None and loud.verdict == "scale_overflow" else loud


def _is_silent(source: Source) -> bool:
    """Return whether a source overflowed its format and was swallowed before it reached a loss or a gradient."""
    kept = source.kind == "made" and source.trains and not source.backward and not source.spoiled_backward
    return kept and bool(source.swallowed) and source.wide is not None and math.isfinite(source.wide)
