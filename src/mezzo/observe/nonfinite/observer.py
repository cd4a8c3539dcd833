"""Find the first value of a training run that left its format's range, at little cost until one does.

After every step two flags are read: whether the loss and the gradients are finite. Operations are inspected in chosen steps only
(``mezzo.observe.nonfinite.propagation``). A step that was not finite and was not inspected is a suspect: the script runs again, and that
step is inspected. If it is finite this time, all later steps are inspected.

Which steps are faulty, and where each fault began, is decided without torch (``mezzo.observe.nonfinite.faults``).
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from mezzo.engine.gradients import parameters_of, trained_by
from mezzo.engine.processes.agreement import Agreement
from mezzo.engine.scaling import DynamicScale, StaticScale
from mezzo.errors import MezzoError
from mezzo.measure.flops import Counted, OperandFormats
from mezzo.observe.module_names import Names
from mezzo.observe.nonfinite.evidence import (
    Evidence,
    Harmless,
    Located,
    LostValues,
    recorded,
    write_evidence,
)
from mezzo.observe.nonfinite.faults import ClosedStep, Faults, InspectedStep, SkipRule, where_it_began
from mezzo.observe.nonfinite.propagation import InfinityTracer
from mezzo.observe.observer import ObservedRun, TracingObserver, Update
from mezzo.observe.settings import DiagnoseSettings, StopScript
from mezzo.observe.source_lines import is_of_mezzo, own_line
from mezzo.observe.trace import RawOperation, count_formats
from mezzo.records import RunRecord


@dataclass
class _Pending:
    """A step that is over; its flags may not have arrived from the device yet."""

    step: int
    flags: Tensor
    skipped: bool
    updates: list[Update]
    inspected: InspectedStep | None
    arrived: torch.cuda.Event | None = None


class NonFinite(TracingObserver):
    """An observer of non-finite values, and of finite values computed from them."""

    def __init__(self, settings: DiagnoseSettings, run: ObservedRun) -> None:
        super().__init__(run, steps=settings.steps)
        self._until = settings.steps[-1]
        self._settings = settings
        self._scale_hook: RemovableHandle | None = None
        self._unfinished: InspectedStep | None = None
        """The record of the last step, if it never ended."""
        self._tracer: InfinityTracer | None = None
        self._marked = 0
        self._narrow = False
        """Whether an operation of an earlier inspected step read or returned 16-bit values."""
        self._inspected: InspectedStep | None = None
        self._pending: _Pending | None = None
        self._faults = Faults(self, settings.suspects)
        self._formats = Counted()
        self._failed: RaisedAt | None = None
        """Where the error that ended the script was raised."""
        self._problems: dict[str, str] = {}
        """Operations that could not be inspected, and why."""
        self._agreement: Agreement | None = None
        """The exchanges with other processes, once the script has formed a group."""
        self._remote_fault: tuple[int, Located | None] = (-1, None)
        """The rank of another process where a fault began, and the place to blame there."""
        self._first_inspected = 0
        """The number of the first inspected step; 0 before that."""

    # --- inspection --------------------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Enter the tracer."""
        self._first_inspected = self._first_inspected or step
        self._narrow = self._narrow or (self._tracer is not None and self._tracer.narrow)
        formats = OperandFormats(inside=lambda: self.run.phase.inside)
        device_type = self.run.precision.device_type or "cpu"
        self._tracer = InfinityTracer(
            formats,
            device_type=device_type,
            flags=self.run.phase,
            scale=self.loss_scale,
            weights=self._weights,
            problems=self._problems,
        )
        self._marked = 0
        self._tracer.start(stepping_is_called=True)
        if self._settings.changes.loss_scale is not None and step == self._first_inspected:
            # Not now: the previous step may still have to divide its gradients by the old scale.
            self._scale_hook = register_module_forward_pre_hook(lambda *_: self._set_scale_of_script())

    def stepping(self) -> None:
        """Compare the gradients that the update uses; the following operations belong to it."""
        if self._tracer is not None and self._observing is not None and not self.run.update.skips:
            self._tracer.compare_gradients()
        super().stepping()

    def updated(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Inspect the weights that an optimizer's step changed; Keras' optimizers have no state to show."""
        is_of_torch = isinstance(optimizer, torch.optim.Optimizer)
        if self._tracer is not None and is_of_torch and self._observing == self._num_closed + 1:
            assert optimizer is not None
            self._tracer.inspect_update(optimizer, self._owner_of)
        super().updated(optimizer)

    def _owner_of(self, weight: Tensor) -> nn.Module | None:
        """Return the module whose own parameter a weight is; None for a weight outside any module."""
        for root in self.names().roots:
            for _, module in self.run.objects.tree.modules(root):
                if any(parameter is weight for _, parameter in self.run.objects.tree.parameters(module)):
                    return module
        return None

    def restart(self) -> None:
        """Discard what was recorded."""
        assert self._tracer is not None
        self._tracer.forget()

    def mark(self) -> None:
        """Mark everything recorded so far as belonging to the step."""
        assert self._tracer is not None
        self._marked = self._tracer.mark()

    def turn(self, step: int) -> None:
        """Keep the step and continue with the next one."""
        assert self._tracer is not None
        self._inspected = _inspected_step(self._tracer, self._marked)
        self._formats = count_formats(self._formats, self._tracer.trace.operations[: self._marked], step - 1)
        self._tracer.keep_after(self._marked)
        self._marked = 0

    def end(self) -> None:
        """Leave the tracer and keep the step."""
        assert self._tracer is not None
        self._tracer.stop()
        if self._observing is not None and self._num_closed >= self._observing:
            self._inspected = _inspected_step(self._tracer, self._marked)
            self._formats = count_formats(self._formats, self._tracer.trace.operations[: self._marked], self._observing)
        else:  # including an operation that raised, which is not in the trace
            self._inspected = _inspected_step(self._tracer, len(self._tracer.trace.operations) + 1)

    def start(self) -> None:
        """Prepare; step 1 begins with the script's first line, or inside the first call of a module."""
        if self._settings.from_start and self._waiting[:1] == [1]:
            self._begin_immediately()
        else:
            super().start()

    def backward_begins(self, losses: Sequence[Tensor]) -> None:
        """Compare the losses; set the policy's loss scale if the settings have one: the previous step has closed by now."""
        if self._tracer is not None and self._observing is not None:
            self._tracer.compare_losses(losses)
        if self._settings.changes.loss_scale is not None and self._observing == self._first_inspected:
            self.run.precision.scale.load_state_dict({"scale": self._settings.changes.loss_scale})

    def backward_ended(self) -> None:
        """Compare the current gradients with their true values."""
        if self._tracer is not None and self._observing is not None:
            self._tracer.backward_ended()
        super().backward_ended()

    def scaler_met(self, scaler: Any) -> None:
        """Set the loss scale of the script's own scaler if the settings have one."""
        if self._settings.changes.loss_scale is not None and (
            self._settings.steps[0] == 1 or self._observing is not None
        ):
            _set_scale(scaler, self._settings.changes.loss_scale)

    # --- steps -----------------------------------------------------------------------------------------------------------------

    def step_closed(self, num_steps: int) -> None:
        """Judge the step that is over; end the script once enough is known."""
        self._inspected = None
        over = False
        try:
            super().step_closed(num_steps)
        except StopScript:
            over = True
        self._judge(num_steps)
        over = over or self._faults.are_enough
        if dist.is_available() and dist.is_initialized():
            over = self._agree(over)
        if over:
            raise StopScript

    def _agree(self, over: bool) -> bool:
        """Return whether any process is to end; adopt the fault of the process where it began.

        All end at the same step: a process that continued alone would wait for the others forever.
        """
        if self._agreement is None:
            self._agreement = Agreement()
        if not any(self._agreement.largest([over])):
            return False
        rank, first = where_it_began(self._agreement.of_each(self._faults.first()))
        if rank != self._agreement.rank:
            self._remote_fault = rank, first
        return True

    def close(self) -> None:
        """Stop inspecting, wherever the script ended, and keep the record of a step that never ended."""
        self._inspected = None
        if self._scale_hook is not None:
            self._scale_hook.remove()
        self._decide_pending()
        super().close()
        if self._inspected is not None and self._num_closed + 1 not in self.watched:
            self._unfinished = self._inspected

    def _judge(self, step: int) -> None:
        recorder = self.run.update.recorder
        flags = recorder.finite_flags()
        self._decide_pending()
        closed = _Pending(step, flags, recorder.last_skipped(), list(self.run.update.parts), self._inspected)
        if self._inspected is None and flags.device.type == "cuda":
            # The flags are read when the next step ends: the copy has finished long before, so nothing waits.
            closed.flags, closed.arrived = flags.to("cpu", non_blocking=True), torch.cuda.Event()
            closed.arrived.record(torch.cuda.current_stream(flags.device))
            self._pending = closed
            return
        self._decide(closed)

    def _decide_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and pending.arrived is not None:
            pending.arrived.synchronize()
            self._decide(pending)

    def _decide(self, closed: _Pending) -> None:
        loss_finite, gradients_finite = (bool(f) for f in closed.flags.tolist())
        parts = {(update.scaler, update.optimizer): update.skipped for update in closed.updates}
        step = ClosedStep(closed.step, loss_finite, gradients_finite, closed.skipped, closed.inspected, parts)
        if self._faults.close(step):  # the script does not repeat the same steps
            begun = self._waiting[0] if self._observing else 0
            self._waiting = list(range(max(closed.step + 1, begun), self._until + 1))

    # --- what is known of the training (``faults.TrainingFacts``) -------------------------------------------------------------------

    def skip_rule(self) -> SkipRule:
        """Return the settings of the loss scale in use."""
        scaler, scale = self.run.update.script_scaler, self.run.precision.scale
        if scaler is not None:
            dynamic = getattr(scaler, "dynamic", True)  # torch's always are
            hysteresis = getattr(scaler, "hysteresis", 1)  # torch's have none
            return SkipRule(dynamic=dynamic, growth_interval=scaler.get_growth_interval(), hysteresis=hysteresis)
        if isinstance(scale, DynamicScale):
            return SkipRule(dynamic=True, growth_interval=scale.growth_interval, hysteresis=scale.hysteresis)
        return SkipRule(dynamic=not isinstance(scale, StaticScale))

    def names(self) -> Names:
        """Return the names of modules and parameters."""
        traced = () if self._tracer is None else self._tracer.trace.roots
        return Names([*self.run.objects.roots, *traced], self.run.objects.tree)

    def largest_norm(self) -> float:
        """Return the largest gradient norm before the step that just closed, at the current loss scale."""
        norms = self.run.update.recorder.steps().grad_norm[:-1]
        scale = self.run.update.gradient_scale
        return max((norm * scale for norm in norms if 0 < norm < float("inf")), default=0.0)

    def _set_scale_of_script(self) -> None:
        if self._scale_hook is not None:
            self._scale_hook.remove()
            self._scale_hook = None
        if self.run.update.script_scaler is not None and self._settings.changes.loss_scale is not None:
            _set_scale(self.run.update.script_scaler, self._settings.changes.loss_scale)

    def _weights(self) -> list[nn.Parameter]:
        return trained_by(self.run.objects.optimizers) or parameters_of(self.run.objects.roots)

    # --- the evidence ----------------------------------------------------------------------------------------------------------------

    def _missed_start(self) -> bool:
        return self._settings.steps[:1] == (1,) and self._first_inspected != 1

    def too_short(self) -> bool:
        """Return whether nothing was inspected, and another run would have nothing to inspect."""
        return not (self.watched or self._faults.bad_steps or self._missed_start())

    def evidence(self, run: RunRecord) -> Evidence:
        """Return the evidence of the run."""
        found = self._faults.evidence(run, watched=self.watched, unfinished=self._unfinished)
        rank, remote = self._remote_fault
        raised = None if self._unfinished is None or self._tracer is None else self._tracer.raised
        names = self.names()
        unexplained = [step for step in self._faults.skips.unexplained if step not in found.faulty_steps]
        return found.model_copy(
            update={
                "located": remote or found.located,
                "found_by_rank": None if remote is None else rank,
                "missed_start": self._missed_start(),
                "unexplained_skips": unexplained,
                "own_scaler": self.run.update.script_scaler is not None,
                "session_policy": self.run.notes.session_policy,
                "scaled": self.run.precision.scale.skips_overflows or self.run.update.script_scaler is not None,
                "narrow": self._narrow or self._tracer is None or self._tracer.narrow,
                "forced_eager": self.forced_eager,
                "problems": self._problems,
                "raised": recorded(raised, names)
                if raised is not None and run.error is not None
                else self._raised(names),
            }
        )

    def _raised(self, names: Names) -> LostValues | None:
        """Return where the script's error was raised, if no operation that was inspected raised it."""
        failed = self._failed
        if failed is None:
            return None
        module, pattern = names.of(failed.module), names.pattern(failed.module)
        return LostValues(
            kind="raised",
            op=failed.op,
            module=module,
            pattern=pattern,
            line=failed.line,
            backward=failed.backward,
            format="",
        )

    def failed(self, error: BaseException) -> None:
        """Keep where the script's own error was raised."""
        if isinstance(error, Exception) and not isinstance(error, MezzoError):
            self._failed = raised_at(error)

    def record(self, run: RunRecord) -> RunRecord:
        """Write the evidence if the settings have a path; return the run's own record, with the formats of inspected steps."""
        if self._settings.evidence_path:
            write_evidence(self.evidence(run), self._settings.evidence_path)
        return self.with_formats(run, self._formats)


def _set_scale(scaler: Any, value: float) -> None:
    scaler.load_state_dict({**scaler.state_dict(), "scale": value})


def _inspected_step(tracer: InfinityTracer, marked: int) -> InspectedStep:
    """Return what the operations before the mark showed."""
    static = tracer.static_scale()
    for source in tracer.sources if static is not None else ():
        if source.backward or source.in_update:
            source.scale, source.static_scale = static or 1.0, True
    sources = [s for s in tracer.sources if s.index < marked]
    results = [result for result in tracer.nonfinite_results if result.index < marked]
    forward = [result for result in results if not (result.backward or result.in_update)]
    of_backward = (RawOperation._make(raw).node is not None for raw in tracer.trace.operations)
    pass_at = list(accumulate(of_backward, initial=0))  # operations with one number have no backward pass between them
    last = {pass_at[result.index]: result.index for result in forward}
    of_loss = [s for result in forward if last[pass_at[result.index]] == result.index for s in result.sources]
    backward = [s for result in results if result.backward for s in result.sources]
    in_update = [s for result in results if result.in_update for s in result.sources]
    lost = dict.fromkeys(s for result in results for s in result.sources if s.kind == "made")
    harmless = [
        Harmless(
            op=s.op,
            line=s.line,
            format=s.format,
            largest=s.wide,
            absorbed_by=list(s.absorbed),
            swallowed_by=list(s.swallowed),
        )
        for s in lost
    ]
    errors = next((errors for errors in reversed(tracer.gradient_errors) if errors.index <= marked), None)
    return InspectedStep(
        sources=sources,
        of_loss=list(dict.fromkeys(of_loss)),
        in_backward=list(dict.fromkeys(backward)),
        in_update=list(dict.fromkeys(in_update)),
        by_update=next((s for s in tracer.update_sources if s.index <= marked), None),
        gradient_errors=errors,
        harmless=harmless,
    )


_CALLS = ("_wrapped_call_impl", "_call_impl", "forward", "__call__", "inner")
"""Functions of torch through which a module is called."""
_BACKWARD = "_engine_run_backward"


class RaisedAt(NamedTuple):
    """The place at which an error was raised."""

    op: str
    """The function of torch that the script, or its module, called; the script's own function without one."""
    module: nn.Module | None
    """The innermost module that was running."""
    line: str
    backward: bool


def raised_at(error: BaseException) -> RaisedAt | None:
    """Return where an error was raised; None if that was in no file of the script."""
    rows = [(frame, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    owned = [own_line(frame)[0].rpartition(":")[0] == frame.f_code.co_filename for frame, _ in rows]
    if not any(owned):
        return None
    last = len(owned) - 1 - owned[::-1].index(True)
    frame, number = rows[last]
    below = [inner.f_code for inner, _ in rows[last + 1 :] if not is_of_mezzo(inner.f_code.co_filename)]
    called = [code.co_name for code in below if code.co_name not in _CALLS]
    return RaisedAt(
        op=called[0] if called else frame.f_code.co_name,
        module=next((module for one, _ in reversed(rows) if (module := _module_of(one)) is not None), None),
        line=f"{frame.f_code.co_filename}:{number}",
        backward=_BACKWARD in called,
    )


def _module_of(frame: FrameType) -> nn.Module | None:
    value = frame.f_locals.get("self")
    return value if isinstance(value, nn.Module) else None
