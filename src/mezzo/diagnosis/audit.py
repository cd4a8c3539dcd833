"""Audit chosen steps of a training script: every operation with its formats, module, phase, FLOPs and bytes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mezzo.devices import this_device
from mezzo.diagnosis import kernels, totals
from mezzo.diagnosis.effective import Lowering
from mezzo.diagnosis.findings import Watched, findings
from mezzo.diagnosis.names import Names
from mezzo.diagnosis.noted import Trace
from mezzo.diagnosis.operations import Seen, understand, weights_of
from mezzo.diagnosis.settings import AuditSettings
from mezzo.diagnosis.trace import Tracer
from mezzo.diagnosis.watching import Diagnosis, Running
from mezzo.errors import SessionError
from mezzo.measure.environment import environment
from mezzo.measure.flops import OperandFormats, lowered
from mezzo.policy import Policy
from mezzo.records import AuditRecord, Reason, RunRecord

AS_IS = "as-is"


class Audit(Diagnosis):
    """Trace chosen steps of a run."""

    def __init__(self, settings: AuditSettings, run: Running) -> None:
        super().__init__(run, steps=settings.steps)
        self._tracer: Tracer | None = None
        self._marked = 0
        self._traces: list[Trace] = []
        self._roots: dict[nn.Module, None] = {}
        self._weights: set[int] = set()
        self._kernels = kernels.KernelWatch()
        self._launches: list[kernels.Launch] = []

    def begin(self, step: int) -> None:
        """Enter the tracer."""
        formats = OperandFormats(inside=lambda: self.run.inside)
        device_type = self.run.device_type or "cpu"
        self._tracer, self._marked = Tracer(formats, device_type=device_type, flags=self.run), 0
        self._tracer.start(told_of_steps=True)
        self._watch_kernels()

    def stepping(self) -> None:
        """Let the tracer tell the operations of an update apart."""
        if self._tracer is not None:
            self._tracer.stepping(True)

    def updated(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Take note of an optimizer's update."""
        if self._tracer is not None:
            self._tracer.stepping(False)
        super().updated(optimizer)

    def restart(self) -> None:
        """Forget what was seen."""
        assert self._tracer is not None
        self._tracer.turn(len(self._tracer.trace.operations))
        self._watch_kernels()

    def mark(self) -> None:
        """Take note that what was seen until now belongs to the step."""
        assert self._tracer is not None
        self._marked = len(self._tracer.trace.operations)

    def turn(self, step: int) -> None:
        """Keep the step and go on with the next one."""
        assert self._tracer is not None
        self._keep(self._tracer.turn(self._marked))
        self._marked = 0

    def end(self) -> None:
        """Leave the tracer and keep the step."""
        assert self._tracer is not None
        self._tracer.stop()
        self._launches += self._kernels.stop()
        self._keep(self._tracer.turn(self._marked))
        self._tracer = None

    def record(self, run: RunRecord) -> AuditRecord:
        """Return what was seen."""
        names = Names([*self.run.roots, *self._roots])
        steps = [understand(trace, names, self._weights) for trace in self._traces[: len(self.watched)]]
        audited = audit_record(
            run,
            self.watched,
            steps,
            names=names,
            policy=self.run.applied,
            device_type=self.run.device_type or "cpu",
            launches=self._launches,
            forced_eager=self.forced_eager,
        )
        formats = {"flops_by_format": audited.flops_by_format, "counted_on_step": next(iter(self.watched), None)}
        emulated = self.run.emulates and lowered(audited.flops_by_format)
        seen = Lowering()
        for trace, step in zip(self._traces, self.watched, strict=False):  # the last one may not have ended
            seen.add(trace.operations, step)
        effective = seen.effective(run.effective, self.run.applied, emulates=self.run.emulates)
        effective = effective.model_copy(update={**formats, "emulated": emulated})
        return audited.model_copy(update={"run": run.model_copy(update={"effective": effective})})

    def _keep(self, trace: Trace) -> None:
        self._traces.append(trace)
        self._roots.update(trace.roots)
        self._weights |= weights_of(self._roots, self.run.optimizers)  # now: the script may end without them

    def _watch_kernels(self) -> None:
        if self.run.device_type == "cuda":
            self._kernels.start()


def audit_record(
    run: RunRecord,
    numbers: Sequence[int],
    steps: Sequence[list[Seen]],
    *,
    names: Names,
    policy: Policy | None,
    device_type: str,
    launches: Sequence[kernels.Launch],
    forced_eager: bool,
) -> AuditRecord:
    """Return the record of watched steps.

    Args:
        run: the run that the steps are part of.
        numbers: the steps' numbers.
        steps: the operations of each.
        names: gives modules their paths.
        policy: what the run is under; None for the script's own precision.
        device_type: torch's device type that the model ran on.
        launches: the kernels that ran, in order; empty where no profiler looked.
        forced_eager: whether compiled code was run eagerly.
    """
    seen = [one for step in steps for one in step]
    products = totals.products(seen)
    if launches:
        products = kernels.prove(products, seen, launches)
    watched = Watched(
        seen=seen,
        wide=totals.wide_products(steps, policy=policy, names=names),
        trips=totals.round_trips(seen),
        products=products,
        device_type=device_type,
        capability=this_device(device_type).capability if device_type == "cuda" else None,
    )
    return AuditRecord(
        run=run,
        steps=list(numbers),
        forced_eager=forced_eager,
        operations=totals.operations(seen),
        flops_by_phase=totals.flops_by_phase(seen),
        casts=totals.casts(seen),
        round_trips=list(watched.trips),
        wide_products=list(watched.wide),
        products=products,
        kernels=kernels.totals(launches, seen),
        findings=[*run.findings, *findings(watched)],
        notes=_notes(device_type, forced_eager=forced_eager, profiled=bool(launches)),
    )


def _notes(device_type: str, *, forced_eager: bool, profiled: bool) -> list[Reason]:
    notes = []
    if forced_eager:
        why = (
            "operations inside compiled kernels belong to no module; compiled code may fuse casts that are listed here"
        )
        notes.append(Reason(what="torch.compile", value="watched steps ran eagerly", reason=why))
    if device_type != "cuda":
        why = f"the model ran on {device_type}; what the operations' shapes allow is judged, not what a GPU ran"
        notes.append(Reason(what="kernels", value="not looked at", reason=why))
    elif not profiled:
        notes.append(Reason(what="kernels", value="not looked at", reason="the profiler returned no kernel"))
    return notes


def audit(step: Callable[[], Any], *, warmup: int = 1) -> AuditRecord:
    """Return which operation of a training step runs in which format, and what is worth changing.

    Args:
        step: makes one training step: forward, backward, update.
        warmup: how often to call it before the call that is watched, so that optimizers have their state.

    Raises:
        SessionError: ``step`` cannot be called, or ``warmup`` is negative.
    """
    if not callable(step) or warmup < 0:
        raise SessionError(
            f"audit(step={step!r}, warmup={warmup}): step is a function without arguments, warmup 0 or more",
            hint="pass a function that makes one training step: mezzo.audit(lambda: train(batch))",
        )
    started = time.perf_counter()
    optimizers: dict[torch.optim.Optimizer, None] = {}
    hook = register_optimizer_step_pre_hook(lambda o, *_: optimizers.setdefault(o))
    with _noting_device() as devices:
        for _ in range(warmup):
            step()
    device_type = next((d for d in devices if d != "cpu"), "cpu")
    tracer = Tracer(OperandFormats(), device_type=device_type)
    profiler = kernels.KernelWatch() if device_type == "cuda" else None
    with _eagerly() as forced_eager:
        tracer.start()
        if profiler is not None:
            profiler.start()
        try:
            step()
        finally:
            launches = profiler.stop() if profiler is not None else []
            tracer.stop()
            hook.remove()
    names = Names(tracer.trace.roots)
    seen = understand(tracer.trace, names, weights_of(names.roots, optimizers))
    run = RunRecord(
        command=[],
        script=getattr(step, "__qualname__", type(step).__name__),
        script_sha256="",
        policy=AS_IS,
        environment=environment(device_type),
        duration_s=time.perf_counter() - started,
    )
    return audit_record(
        run,
        [warmup + 1],
        [seen],
        names=names,
        policy=None,
        device_type=device_type,
        launches=launches,
        forced_eager=forced_eager,
    )


@contextmanager
def _noting_device() -> Iterator[dict[str, None]]:
    """Collect the device types of the parameters of modules that are called."""
    found: dict[str, None] = {}

    def note(module: nn.Module, args: Any) -> None:
        for parameter in module.parameters(recurse=False):
            found.setdefault(parameter.device.type)

    hook = register_module_forward_pre_hook(note)
    try:
        yield found
    finally:
        hook.remove()


@contextmanager
def _eagerly() -> Iterator[bool]:
    """Run compiled code eagerly; yield whether any was compiled."""
    if "torch._dynamo" not in sys.modules:
        yield False
        return
    compiled = bool(torch._dynamo.utils.counters["frames"])
    torch.compiler.set_stance("force_eager")
    try:
        yield compiled
    finally:
        torch.compiler.set_stance("default")
