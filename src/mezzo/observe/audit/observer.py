"""Audit chosen steps of a training script: every operation with its formats, module, phase, FLOPs and bytes."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mezzo.devices import cuda_devices_in_use, this_device
from mezzo.measure.flops import Counted, OperandFormats
from mezzo.observe.audit import merged
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
from mezzo.records import AuditRecord, CastTotal, Kernel, Note, Product, RoundTrip, RunRecord, WideProduct


class Audit(Observer):
    """An observer that traces chosen steps of a run."""

    def __init__(self, settings: AuditSettings, run: ObservedRun) -> None:
        super().__init__(run, steps=settings.steps, ends_script=settings.contract is None)
        self._marked = 0
        self._first_optimizer_at: tuple[int, int] | None = None
        """The tracer's position when the script created its first optimizer."""
        self._traces: list[Trace] = []
        self._roots: dict[nn.Module, None] = {}
        self._weights: set[int] = set()
        self._kernels = KernelWatch()
        self._launches: list[Launch] = []

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
        contract = self.run.checked_contract(failed=run.error is not None)
        changed = {"run": self.with_formats(run, counted), "contract": contract}
        return audited.model_copy(update=changed)

    def too_short(self) -> bool:
        """Return whether nothing was recorded; a contract is checked of any training, even if it ends before the first audited step."""
        return self._ends_script and super().too_short()

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
    launches: Sequence[Launch],
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
        shaped = prove(shaped, operations, launches)
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
        kernels=totals(launches, operations),
        findings=[*run.findings, *findings(audited)],
        notes=_notes(device_type, forced_eager=forced_eager, profiled=bool(launches), gave_way=gave_way),
    )


def _notes(device_type: str, *, forced_eager: bool, profiled: bool, gave_way: bool) -> list[Note]:
    notes = []
    if forced_eager:
        why = (
            "operations inside compiled kernels belong to no module; compiled code may fuse casts that are listed here"
        )
        notes.append(Note(what="torch.compile", value="audited steps ran eagerly", reason=why))
    if device_type != "cuda":
        why = f"the model ran on {device_type}; what the operations' shapes allow is judged, not what a GPU ran"
        notes.append(Note(what="kernels", value="not recorded", reason=why))
    elif gave_way:
        why = "the script's own profiler ran in these steps, and a process can run only one; audit steps that it does not profile"
        notes.append(Note(what="kernels", value="recorded in part" if profiled else "not recorded", reason=why))
    elif not profiled:
        notes.append(Note(what="kernels", value="not recorded", reason="the profiler returned no kernel"))
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


# The profiler numbers every operation that the host calls and links every kernel to its operation. The trace and the profile
# contain the same products in the same order, so the n-th ``mm`` of one is the n-th of the other. Whether a kernel uses Tensor Cores
# is read from its name: NVIDIA's libraries put the instruction's tile into it (``s16816``, ``h884``), or the class of kernel
# (``tensorop``, ``xmma``, ``wgmma``, ``nvjet``, flash attention). CUTLASS 3 names
# the instruction (``Gmma`` on Hopper, ``Umma`` or ``tcgen05`` on Blackwell), AMD's libraries the matrix instruction's tile
# (``_MI32x32x8``) or its class (``mfma``, ``wmma``), and torch.compile calls its own templates of products ``triton_tem_``.
#
# A kernel whose name has none of these words counts as one without Tensor Cores; a future library may use other names.
_TENSOR_CORE_NAMES = re.compile(
    r"[his](884|1688|16816|16832|161616|1688tf32)|tensorop|tensor_?core|[hi]mma|xmma|gmma|umma|wmma|mfma|tcgen05|nvjet"
    r"|fmha|flash_(fwd|bwd)|pytorch_flash|cudnn_generated_fort_native_sdpa|triton_tem_|_MI\d+x\d+",
    re.IGNORECASE,
)
_DISCARD = "mezzo: everything before this belongs to an earlier step"
_SIMT_NAMES = re.compile(r"simt|_sgemm|_dgemm|ffma", re.IGNORECASE)
_NO_OPERATION = ("overhead", "cuda_runtime", "cuda_driver")
_PROFILER_NAMES = {"convolution": "aten::convolution", "convolution_backward": "aten::convolution_backward"}


def uses_tensor_cores(name: str) -> bool:
    """Return whether a kernel of this name uses Tensor Cores."""
    return bool(_TENSOR_CORE_NAMES.search(name)) and not _SIMT_NAMES.search(name)


@dataclass(frozen=True)
class Launch:
    """A kernel that ran for one operation."""

    op: str
    """The operation, as the profiler names it (``aten::mm``)."""
    call: int
    """The number of the call among the calls of this operation, from 0."""
    kernel: str
    time_us: float


class KernelWatch:
    """A profile of a device while a step runs.

    A process has only one profiler of torch: if two profiles overlap, ending the second raises or finds nothing. So the script's own takes
    precedence. And an event that begins under one profile must not end under the next: torch would write its end into the memory of the
    first, which is freed by then. So ``restart``, which is called inside an optimizer's step, leaves the profile running.
    """

    def __init__(self) -> None:
        self._profiler: Any = None
        self._is_starting = False
        self._script_profiles: set[int] = set()
        """The script's open profiles, by identity."""
        self.gave_way = False
        """Whether a profile of the script kept this profile from recording."""

    def profile_begins(self, profile: object) -> None:
        """Give way to a profile of the script. Call this before that profile prepares."""
        if not self._is_starting:
            self.gave_way |= self._profiler is not None
            self.drop()
            self._script_profiles.add(id(profile))

    def profile_ended(self, profile: object) -> None:
        """Note the end of a profile."""
        self._script_profiles.discard(id(profile))

    def start(self) -> None:
        """Start profiling unless the script does; discard an earlier profile."""
        self.drop()
        if self._script_profiles:
            self.gave_way = True
            return
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        # Without acc_events, torch warns that the events of one cycle are dropped at the end of the next.
        self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
        self._is_starting = True
        try:
            self._profiler.__enter__()
        finally:
            self._is_starting = False

    def restart(self) -> None:
        """Discard what was recorded so far."""
        with torch._C._profiler._RecordFunctionFast(_DISCARD):
            pass

    def drop(self) -> None:
        """Stop and discard the profile."""
        if self._profiler is not None:
            self._profiler.__exit__(None, None, None)
            self._profiler = None

    def stop(self) -> list[Launch]:
        """Stop and return the kernels that ran."""
        if self._profiler is None:
            return []
        for device in cuda_devices_in_use():
            torch.cuda.synchronize(device)
        profiler = self._profiler
        self.drop()
        return launches(_after_restart(profiler.events()))


def _after_restart(events: Sequence[Any]) -> list[Any]:
    """Return the events after the last call of ``restart``."""
    begin = max((event.time_range.end for event in events if event.name == _DISCARD), default=-math.inf)
    return [event for event in events if event.time_range.start >= begin]


def launches(events: Iterable[Any]) -> list[Launch]:
    """Return the kernels of a profile by the call of the operation that launched them, directly or through others.

    Autocast's casts run inside the outer call of an operation, before its inner call. They are not part of the operation.
    """
    return [
        Launch(event.name, number, kernel.name, kernel.duration)
        for event, number in calls(events)
        if event.name.startswith("aten::")
        for kernel in _kernels_below(_innermost(event))
    ]


def calls(events: Iterable[Any]) -> Iterator[tuple[Any, int]]:
    """Yield every call of an operation in a profile, with its number among the calls of that operation.

    An active dispatch mode calls each operation a second time, inside the first.
    """
    numbers: dict[str, int] = defaultdict(int)
    for event in sorted(events, key=lambda e: e.time_range.start):
        outer = event.cpu_parent
        while outer is not None and outer.name != event.name:
            outer = outer.cpu_parent
        if outer is None:
            yield event, numbers[event.name]
            numbers[event.name] += 1


def _innermost(event: Any) -> Any:
    """Return the last call of the same operation inside ``event``: the one after autocast and dispatch modes."""
    below = [event]
    for inner in below:
        below += inner.cpu_children
    return [inner for inner in below if inner.name == event.name][-1]


def _kernels_below(event: Any) -> list[Any]:
    # The profiler matches kernels by number, and its own overhead ("Lazy Function Loading") can have the number of an operation.
    typed = getattr(event, "activity_type", None)  # older versions of torch have no types
    kernels = [] if typed in _NO_OPERATION else event.kernels
    return [*kernels, *(kernel for child in event.cpu_children for kernel in _kernels_below(child))]


def totals(launched: Sequence[Launch], operations: Sequence[TracedOperation]) -> list[Kernel]:
    """Return the kernels of the products in ``operations``, the longest-running first."""
    names = {_profiler_name(operation) for operation in operations if operation.product is not None}
    times: dict[str, list[float]] = defaultdict(list)
    for launch in launched:
        if launch.op in names:
            times[launch.kernel].append(launch.time_us)
    kernels = [
        Kernel(name=name, count=len(us), time_ms=sum(us) / 1e3, tensor_cores=uses_tensor_cores(name))
        for name, us in times.items()
    ]
    return sorted(kernels, key=lambda kernel: -kernel.time_ms)


def prove(
    products: Sequence[Product], operations: Sequence[TracedOperation], launched: Sequence[Launch]
) -> list[Product]:
    """Return ``products`` with the kernels that ran for each."""
    by_call: dict[tuple[str, int], list[str]] = defaultdict(list)
    for launch in launched:
        by_call[launch.op, launch.call].append(launch.kernel)
    names: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    number: dict[str, int] = defaultdict(int)
    last = None
    for operation in operations:
        if operation.product is None:
            continue
        name = _profiler_name(operation)
        number[name] += operation.raw is not last  # both gradients of a convolution come from one call
        last = operation.raw
        names[operation.op, operation.module, operation.phase] |= set(by_call[name, number[name] - 1])
    return [_proven(product, names[product.op, product.module, product.phase]) for product in products]


def _proven(product: Product, kernels: set[str]) -> Product:
    if not kernels:
        return product
    proof = any(uses_tensor_cores(name) for name in kernels)
    return product.model_copy(update={"kernels": sorted(kernels), "on_tensor_cores": proof})


def _profiler_name(operation: TracedOperation) -> str:
    return _PROFILER_NAMES.get(operation.op, f"aten::{operation.op}")
