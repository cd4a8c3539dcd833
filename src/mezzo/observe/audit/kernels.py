"""Read from torch's profiler which kernels ran the products of a step: proof of whether Tensor Cores did the work.

The profiler numbers every operation that the host calls and links every kernel to its operation. The trace and the profile
contain the same products in the same order, so the n-th ``mm`` of one is the n-th of the other. Whether a kernel uses Tensor Cores
is read from its name: NVIDIA's libraries put the instruction's tile into it (``s16816``, ``h884``), or the class of kernel
(``tensorop``, ``xmma``, ``wgmma``, ``nvjet``, flash attention). CUTLASS 3 names
the instruction (``Gmma`` on Hopper, ``Umma`` or ``tcgen05`` on Blackwell), AMD's libraries the matrix instruction's tile
(``_MI32x32x8``) or its class (``mfma``, ``wmma``), and torch.compile calls its own templates of products ``triton_tem_``.

A kernel whose name has none of these words counts as one without Tensor Cores; a future library may use other names.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mezzo.devices import cuda_devices_in_use
from mezzo.observe.audit.operations import TracedOperation
from mezzo.records import Kernel, Product

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
