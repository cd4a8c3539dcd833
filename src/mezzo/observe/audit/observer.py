"""Audit chosen steps of a training script: every operation with its formats, module, phase, FLOPs and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn

from mezzo.devices import this_device
from mezzo.measure.flops import Counted, OperandFormats
from mezzo.observe.audit import kernels, merged
from mezzo.observe.audit.causes import FIXES, Why, is_wide, lowers, shape_of, why_wide
from mezzo.observe.audit.findings import AuditedSteps, findings
from mezzo.observe.audit.merged import grouped, largest
from mezzo.observe.audit.operations import TracedOperation, interpret, weights_of
from mezzo.observe.module_names import Names
from mezzo.observe.observer import ObservedRun, Observer
from mezzo.observe.settings import AuditSettings
from mezzo.observe.trace import Trace, count_formats
from mezzo.observe.tracer import Tracer
from mezzo.policy import Policy
from mezzo.records import AuditRecord, CastTotal, Product, Reason, RoundTrip, RunRecord, WideProduct


class Audit(Observer):
    """An observer that traces chosen steps of a run."""

    def __init__(self, settings: AuditSettings, run: ObservedRun) -> None:
        super().__init__(run, steps=settings.steps)
        self._marked = 0
        self._first_optimizer_at: tuple[int, int] | None = None
        """The tracer's position when the script created its first optimizer."""
        self._traces: list[Trace] = []
        self._roots: dict[nn.Module, None] = {}
        self._weights: set[int] = set()
        self._kernels = kernels.KernelWatch()
        self._launches: list[kernels.Launch] = []

    def begin(self, step: int) -> None:
        """Start the tracer."""
        formats = OperandFormats(inside=lambda: self.run.phase.inside)
        device_type = self.run.precision.device_type or "cpu"
        self._tracer, self._marked = (
            Tracer(formats, device_type=device_type, flags=self.run.phase, inspect=self.run.inspection(step)),
            0,
        )
        self._first_optimizer_at = None  # a position in the tracer of the thread that this one replaces
        self._tracer.start(stepping_is_called=True)
        self._watch_kernels()

    def move(self, step: int) -> None:
        """Begin again in the thread that trains."""
        assert self._tracer is not None
        self._tracer.leave_behind()
        self._kernels.stop()
        self.begin(step)

    def restart(self) -> None:
        """Discard what was recorded."""
        assert self._tracer is not None
        self._tracer.turn(len(self._tracer.trace.operations))
        self._kernels.restart()

    def optimizer_created(self) -> None:
        """Note which operations ran before now: a script may try its model before it trains it."""
        if self._tracer is not None:
            self._first_optimizer_at = self._tracer.position()

    def mark(self) -> None:
        """Mark everything recorded so far as belonging to the step."""
        assert self._tracer is not None
        created_at, self._first_optimizer_at = self._first_optimizer_at, None
        if created_at is not None and not self._tracer.trace.reaches_back(*created_at):
            self._tracer.turn(created_at[0])
        self._marked = len(self._tracer.trace.operations)

    def turn(self, step: int) -> None:
        """Keep the step and continue with the next one."""
        assert self._tracer is not None
        self._keep(self._tracer.turn(self._marked))
        self._marked = 0

    def profile_begins(self, profile: object) -> None:
        """Stop the audit's profile in favour of the script's."""
        self._kernels.profile_begins(profile)

    def profile_ended(self, profile: object) -> None:
        """Allow the audit to profile again."""
        self._kernels.profile_ended(profile)

    def end(self) -> None:
        """Stop the tracer and keep the step."""
        assert self._tracer is not None
        self._tracer.stop()
        self._launches += self._kernels.stop()
        self._keep(self._tracer.turn(self._marked))
        self._tracer = None

    def record(self, run: RunRecord) -> AuditRecord:
        """Return the record of the audited steps."""
        names = Names([*self.run.objects.roots, *self._roots], self.run.objects.tree)
        steps = [interpret(trace, names, self._weights) for trace in self._traces[: len(self.watched)]]
        audited = audit_record(
            run,
            self.watched,
            steps,
            names=names,
            policy=self.run.precision.effective,
            device_type=self.run.precision.device_type or "cpu",
            launches=self._launches,
            forced_eager=self.forced_eager,
            gave_way=self._kernels.gave_way,
        )
        counted = Counted()
        for trace, step in zip(self._traces, self.watched, strict=False):  # the last step may not have ended
            counted = count_formats(counted, trace.operations, step)
        return audited.model_copy(update={"run": self.with_formats(run, counted)})

    def _keep(self, trace: Trace) -> None:
        self._traces.append(trace)
        self._roots.update(trace.roots)
        # Now, because the script may drop its optimizers before it ends.
        self._weights |= weights_of(self._roots, self.run.objects.optimizers)

    def _watch_kernels(self) -> None:
        if self.run.precision.device_type == "cuda":
            self._kernels.start()


def audit_record(
    run: RunRecord,
    numbers: Sequence[int],
    steps: Sequence[list[TracedOperation]],
    *,
    names: Names,
    policy: Policy | None,
    device_type: str,
    launches: Sequence[kernels.Launch],
    forced_eager: bool,
    gave_way: bool = False,
) -> AuditRecord:
    """Return the record of observed steps.

    Args:
        run: the run that the steps are part of.
        numbers: the steps' numbers.
        steps: the operations of each.
        names: the paths of modules.
        policy: the run's policy; None for the script's own precision.
        device_type: torch's device type that the model ran on.
        launches: the kernels that ran, in order; empty if no profiler ran.
        forced_eager: whether compiled code was run eagerly.
        gave_way: whether the script's own profiler ran instead.
    """
    operations = [operation for step in steps for operation in step]
    shaped = products(operations)
    if launches:
        shaped = kernels.prove(shaped, operations, launches)
    audited = AuditedSteps(
        operations=operations,
        wide=wide_products(steps, policy=policy, names=names),
        trips=round_trips(operations),
        products=shaped,
        device_type=device_type,
        fixes=FIXES if run.library == "keras" else {},
        capability=this_device(device_type).capability if device_type == "cuda" else None,
    )
    return AuditRecord(
        run=run,
        steps=list(numbers),
        forced_eager=forced_eager,
        operations=merged.operations(operations),
        flops_by_phase=merged.flops_by_phase(operations),
        casts=casts(operations),
        round_trips=list(audited.trips),
        wide_products=list(audited.wide),
        products=shaped,
        kernels=kernels.totals(launches, operations),
        findings=[*run.findings, *findings(audited)],
        notes=_notes(device_type, forced_eager=forced_eager, profiled=bool(launches), gave_way=gave_way),
    )


def _notes(device_type: str, *, forced_eager: bool, profiled: bool, gave_way: bool) -> list[Reason]:
    notes = []
    if forced_eager:
        why = (
            "operations inside compiled kernels belong to no module; compiled code may fuse casts that are listed here"
        )
        notes.append(Reason(what="torch.compile", value="audited steps ran eagerly", reason=why))
    if device_type != "cuda":
        why = f"the model ran on {device_type}; what the operations' shapes allow is judged, not what a GPU ran"
        notes.append(Reason(what="kernels", value="not recorded", reason=why))
    elif gave_way:
        why = "the script's own profiler ran in these steps, and a process can run only one; audit steps that it does not profile"
        notes.append(Reason(what="kernels", value="recorded in part" if profiled else "not recorded", reason=why))
    elif not profiled:
        notes.append(Reason(what="kernels", value="not recorded", reason="the profiler returned no kernel"))
    return notes


_FORWARD = ("forward", "recompute")


def casts(operations: Iterable[TracedOperation]) -> list[CastTotal]:
    """Return all casts, equal ones merged, the largest first."""
    return merged.casts(
        CastTotal(
            module=operation.module,
            phase=operation.phase,
            of=operation.cast.of,
            source=operation.cast.source,
            target=operation.cast.target,
            bytes=operation.bytes,
            line=operation.raw.line,
        )
        for operation in operations
        if operation.cast is not None
    )


def round_trips(operations: Sequence[TracedOperation]) -> list[RoundTrip]:
    """Return the casts that a later cast undoes, by the module of the first of the two, the largest first."""
    undone = [(operation, operation.cast) for operation in operations if operation.cast is not None]
    trips = [(cast.back_to, operation, cast) for operation, cast in undone if cast.back_to is not None]
    groups = grouped(
        trips, lambda trip: (trip[0].module, trip[1].phase, trip[2].source, trip[2].target, trip[2].needless)
    )
    totals = [
        RoundTrip(
            module=first.module,
            phase=second.phase,
            formats=f"{cast.target} > {cast.source} > {cast.target}",
            needless=cast.needless,
            count=len(group),
            bytes=sum(there.bytes + back.bytes for there, back, _ in group),
            line=first.raw.line,
        )
        for group in groups
        for first, second, cast in group[:1]
    ]
    return largest(totals, lambda trip: trip.bytes)


def wide_products(
    steps: Sequence[Sequence[TracedOperation]], *, policy: Policy | None, names: Names
) -> list[WideProduct]:
    """Return the products that ran in FP32 or wider, by cause, the largest first."""
    elsewhere = any(lowers(step) for step in steps)
    totals: Counter[tuple[str, str, Why, str]] = Counter()
    for step in steps:
        backward = _backward_flops(step)
        modules: dict[str, tuple[str, str, Why, str]] = {}
        for operation in step:
            if operation.phase in _FORWARD and is_wide(operation):
                assert operation.product is not None
                why = why_wide(operation, policy=policy, lowers_elsewhere=elsewhere, names=names)
                key = operation.op, operation.format, why, operation.raw.line
                modules.setdefault(operation.module, key)
                totals[key] += operation.flops + backward.pop(operation.product.number, (0, ""))[0]
        for flops, module in backward.values():  # of a gradient that is differentiated again
            if module in modules:
                totals[modules[module]] += flops
    products = [
        WideProduct(op=op, module=why.module, format=fmt, cause=why.cause, reason=why.reason, flops=flops, line=line)
        for (op, fmt, why, line), flops in totals.items()
    ]
    return largest(products, lambda product: product.flops)


def _backward_flops(step: Sequence[TracedOperation]) -> dict[int, tuple[int, str]]:
    """Return the FLOPs of the wide products of backward passes, and their module, by the number of their graph node."""
    totals: dict[int, tuple[int, str]] = {}
    for operation in step:
        if operation.phase not in _FORWARD and operation.raw.node is not None and is_wide(operation):
            number = operation.raw.node.number
            totals[number] = totals.get(number, (0, ""))[0] + operation.flops, operation.module
    return totals


def products(operations: Iterable[TracedOperation]) -> list[Product]:
    """Return all products by the shape that a Tensor Core works on, the largest first."""
    shaped = ((operation, shape_of(operation)) for operation in operations if operation.product is not None)
    return merged.products((operation, shape) for operation, shape in shaped if shape is not None)
