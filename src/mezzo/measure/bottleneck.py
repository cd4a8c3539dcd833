"""Decide what holds a run back, by a pure function of the shares of the run's time.

input          the thread waited for its DataLoader
communication  it waited in a collective of torch.distributed
waiting        it slept elsewhere: a lock, ``time.sleep``, a disk, a socket
preempted      it was ready to run while other processes had the cores: not the script's fault, never the verdict
host           it ran Python, or operations so small that launching them takes longer than the work
bandwidth      it ran operations that move more bytes than the machine can while it computes their products
arithmetic     it ran products: only the device's rate holds it back

The work of operations (``OperationTimes``) and the rates of the device (``DeviceRates``) that it compares are measured here, too.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mezzo.measure.flops import FLOP_COUNTS, num_real_products
from mezzo.records import Bottleneck, GpuUse, Limit, Note

_LOST = 0.25
"""Share of the time from which a wait is what holds a run back. A healthy loader takes a few per cent."""
_MIN_STEPS, _MIN_S = 5, 0.2
_TINY_S = 10e-6
"""An operation with less work than this takes as long as its launch."""
_HOST = 0.6
"""Share of the busy time from which the host is named."""
_USUAL_WORKERS = 4
"""Of a data loader; fewer where there are fewer cores, because torch warns of more workers than cores."""
_AT_LIMIT, _OFTEN = 0.95, 0.3
"""Power against its limit, and share of the samples throttled by it, from which power is named."""


@dataclass(frozen=True, kw_only=True)
class OperationWork:
    """One operation's work."""

    flops: int
    bytes: int
    """Of its operands and results, each read or written once; 0 for a view."""
    cpu_s: float
    """CPU time of its thread."""


@dataclass(frozen=True, kw_only=True)
class Loader:
    """The settings of the data loader that was waited for."""

    num_workers: int
    pin_memory: bool
    persistent_workers: bool


@dataclass(frozen=True, kw_only=True)
class RunMeasurements:
    """Measurements of a run, all over the same steps."""

    num_steps: int
    wall_s: float
    input_s: float | None = None
    communication_s: float | None = None
    idle_share: float | None = None
    """Share of the time in which the training thread slept, waits for input and communication included."""
    preempted_share: float = 0.0
    """Share of the time in which it was ready to run and other processes or threads had the cores."""
    operations: Sequence[OperationWork] = ()
    """Of one step; empty if they were not counted."""
    rates: DeviceRates | None = None
    """Of the device, to weigh operations against bytes."""
    on_gpu: bool = False
    compiled: bool = False
    emulated: bool = False
    loader: Loader | None = None
    num_cores: int = 1
    """How many the process may use."""
    sleeping_line: str = ""
    gpu: GpuUse | None = None
    not_measured: list[Note] = field(default_factory=list)


def bottleneck(run: RunMeasurements) -> Bottleneck:
    """Return what holds a run back, and what to change."""
    if too_short(run.num_steps, run.wall_s):
        short = f"too short to tell, {run.num_steps} steps in {run.wall_s:.2g} s after the first tenth"
        return Bottleneck(limit="unknown", sentence=short, gpu=run.gpu, not_measured=run.not_measured)
    shares = shares_of(run)
    limit = _limit(run, shares)
    operation_us = 1e6 * sum(one.cpu_s for one in run.operations) / max(len(run.operations), 1)
    line = run.sleeping_line if limit == "waiting" else ""
    return Bottleneck(
        limit=limit,
        sentence=_sentence(limit, run, shares, line=line, operation_us=operation_us),
        change=_changes(limit, run),
        shares=shares,
        line=line,
        operations=len(run.operations) or None,
        operation_us=operation_us if run.operations else None,
        gpu=run.gpu,
        not_measured=run.not_measured,
    )


def too_short(num_steps: int, wall_s: float) -> bool:
    """Return whether so few steps in so little time leave no verdict, so that nothing else has to be measured."""
    return num_steps < _MIN_STEPS or wall_s < _MIN_S


def shares_of(run: RunMeasurements) -> dict[str, float]:
    """Return the share of the time by kind, as far as it was measured.

    Shares are of the time without ``preempted``, which is itself a share of the whole time: what other processes took is not the script's
    time. It is deducted in proportion from waits that computed, such as those for a loader without workers, and from the rest.
    """
    waits = {"input": run.input_s, "communication": run.communication_s}
    known = {name: min(waited_s / run.wall_s, 1.0) for name, waited_s in waits.items() if waited_s is not None}
    waited = min(sum(known.values()), 1.0)
    if run.on_gpu:
        return _rounded(known | _gpu_kinds(run, waited))
    idle, preempted = run.idle_share or 0.0, run.preempted_share
    asleep = min(waited, idle)
    ran = 1.0 - preempted / max(1.0 - idle, preempted, 1e-9)  # had a core, of the time in which it was ready to run
    waited_alone = asleep + (waited - asleep) * ran
    parts = {name: share * waited_alone / waited for name, share in known.items()} if waited else dict(known)
    if run.idle_share is not None:
        parts["waiting"] = idle - asleep
    busy = max(1.0 - idle - (waited - asleep), 0.0) * ran
    whole = max(sum(parts.values()) + busy, 1e-9)
    parts |= {name: busy * share for name, share in _kinds(run, busy).items()}
    shares = {name: part / whole for name, part in parts.items()}
    return _rounded(shares if run.idle_share is None else shares | {"preempted": preempted})


def _rounded(shares: dict[str, float]) -> dict[str, float]:
    return {name: round(share, 4) for name, share in shares.items()}


def _kinds(run: RunMeasurements, busy: float) -> dict[str, float]:
    """Return host, bandwidth and arithmetic as shares of the CPU's busy time; empty where operations or rates are not known."""
    if run.rates is None or not run.operations:
        return {}
    seconds = {"bandwidth": 0.0, "arithmetic": 0.0}
    for operation in run.operations:
        kind, work_s = _kind(operation, run.rates)
        if work_s >= _TINY_S:
            seconds[kind] += operation.cpu_s
    known_s = sum(seconds.values())
    host_s = max(busy * run.wall_s / run.num_steps - known_s, 0.0)
    total_s = known_s + host_s
    return {"host": host_s / total_s, **{k: v / total_s for k, v in seconds.items()}} if total_s else {}


def _kind(operation: OperationWork, rates: DeviceRates) -> tuple[str, float]:
    """Return what an operation waits for, and the least time that its work takes at the device's rates."""
    multiply_s, move_s = operation.flops / rates.flops_per_s, operation.bytes / rates.bytes_per_s
    return ("arithmetic" if multiply_s >= move_s else "bandwidth"), max(multiply_s, move_s)


def _gpu_kinds(run: RunMeasurements, waited: float) -> dict[str, float]:
    """Return the kinds by the GPU's own utilisation: its idle time beyond known waits is the host's."""
    used = None if run.gpu is None else run.gpu.utilization
    shares = {} if used is None else {"host": max(1.0 - used - waited, 0.0)}
    busy = max(1.0 - waited - shares.get("host", 0.0), 0.0)
    if run.rates is None or not run.operations:
        return shares
    seconds = {"bandwidth": 0.0, "arithmetic": 0.0}
    for operation in run.operations:
        kind, work_s = _kind(operation, run.rates)
        seconds[kind] += work_s
    total_s = sum(seconds.values())
    return shares | ({kind: busy * s / total_s for kind, s in seconds.items()} if total_s else {})


def _limit(run: RunMeasurements, shares: dict[str, float]) -> Limit:
    lost: dict[Limit, float] = {
        name: shares[name] for name in ("input", "communication", "waiting") if shares.get(name, 0.0) >= _LOST
    }
    if lost:
        return max(lost, key=lambda name: lost[name])
    if _is_power_limited(run.gpu):
        return "power"
    host = shares.get("host", 0.0)
    device = shares.get("bandwidth", 0.0) + shares.get("arithmetic", 0.0)
    if host >= (_LOST if run.on_gpu else _HOST * (host + device)) and host > 0:
        return "host"
    if not device:
        return "unknown"
    return "bandwidth" if shares["bandwidth"] > shares["arithmetic"] else "arithmetic"


def _is_power_limited(gpu: GpuUse | None) -> bool:
    if gpu is None or gpu.power_w is None or not gpu.power_limit_w:
        return False
    often = max(gpu.throttled.get("power limit", 0.0), gpu.throttled.get("power brake", 0.0)) >= _OFTEN
    return often and gpu.power_w >= _AT_LIMIT * gpu.power_limit_w


def _sentence(limit: Limit, run: RunMeasurements, shares: dict[str, float], *, line: str, operation_us: float) -> str:
    def share(name: str) -> str:
        return f"{shares.get(name, 0.0):.0%}"

    where = f", most often at {line}" if line else ""
    match limit:
        case "input":
            return f"{share('input')} of the time is spent waiting for the data loader"
        case "communication":
            return f"{share('communication')} of the time is spent waiting in torch.distributed"
        case "waiting":
            return f"the training thread sleeps {share('waiting')} of the time{where}"
        case "power":
            return "the GPU runs at its power limit, which keeps its clock down"
        case "host":
            counted = f"{len(run.operations)} operations a step of {operation_us:.0f} us on average"
            return f"{share('host')} of the time is spent in Python and in launching operations ({counted})"
        case "bandwidth":
            return f"{share('bandwidth')} of the time is spent in operations that mostly move memory"
        case "arithmetic":
            return f"{share('arithmetic')} of the time is spent in products, and {_no_wait(shares)}"
    why = "compiled code's operations are not seen" if run.compiled else "no operation was counted"
    why = "formats were emulated, so times of operations say nothing" if run.emulated else why
    return f"{_no_wait(shares)}, and {why}"


def _no_wait(shares: dict[str, float]) -> str:
    preempted = shares.get("preempted", 0.0)
    if preempted < _LOST:
        return f"no wait reaches {_LOST:.0%}"
    return f"no wait of its own reaches {_LOST:.0%} (other threads or processes had the cores for {preempted:.0%} of the whole time)"


def _changes(limit: Limit, run: RunMeasurements) -> list[str]:
    """Return what to change, the most promising first."""
    match limit:
        case "input":
            return _loader_changes(run)
        case "communication":
            return [
                "exchange gradients once per window of micro-batches: no_sync(), or mezzo.Session's accumulate",
                "larger batches on each process, so that a step computes longer between exchanges",
                "larger DDP buckets (bucket_cap_mb), and the same number of batches on each rank",
            ]
        case "waiting":
            where = f" at {run.sleeping_line}" if run.sleeping_line else ""
            return [f"remove the wait{where}, or move it to another thread: a lock, a sleep, a file or a server"]
        case "host":
            compiled = [] if run.compiled else ["torch.compile, which joins small operations"]
            captured = ["the step as a CUDA graph (mezzo.Session's capture)"] if run.on_gpu else []
            return ["a larger batch", *compiled, *captured, "fewer, larger operations instead of Python loops"]
        case "bandwidth":
            lower = "a 16-bit policy, which halves the bytes: mezzo compare"
            compiled = [] if run.compiled else ["torch.compile, which fuses element-wise operations"]
            return [*compiled, lower, "channels_last for convolutions", "fused optimizers (mezzo.AdamW, fused=True)"]
        case "power":
            return [
                "a lower precision, which needs less energy for each product",
                "a higher limit, if the owner allows one",
            ]
        case "arithmetic":
            return ["a lower precision: mezzo compare shows what it keeps and gains"]
    return []


def _loader_changes(run: RunMeasurements) -> list[str]:
    loader = run.loader
    if loader is None:
        return ["read batches ahead, in a DataLoader with workers"]
    changes = []
    if loader.num_workers == 0:
        num_workers = min(_USUAL_WORKERS, run.num_cores)
        changes.append(f"DataLoader(num_workers={num_workers}): it has no workers, so nothing trains while it reads")
    else:
        more = f"more workers than {loader.num_workers}, or " if loader.num_workers < run.num_cores else ""
        changes.append(f"{more}cheaper transforms and decoding")
        if not loader.persistent_workers:
            changes.append("persistent_workers=True: its workers are started again in each epoch")
    if run.on_gpu and not loader.pin_memory:
        changes.append("pin_memory=True, and .to(device, non_blocking=True)")
    return [*changes, "data that is prepared once and kept in memory or in a faster format"]


_SIDE = 384
_COPIED = 8 << 20
"""Numbers in the copied tensor: 32 MiB, beyond most caches."""
_REPEATS = 4


class DeviceRates(NamedTuple):
    """Rates of a device."""

    flops_per_s: float
    bytes_per_s: float


@functools.cache
def cpu_rates(threads: int) -> DeviceRates:
    """Return the rates of FP32 products and of copies with this many threads; measured once per process."""
    cpu: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    with torch.no_grad():
        square, product = torch.ones(_SIDE, _SIDE, **cpu), torch.empty(_SIDE, _SIDE, **cpu)
        source, copied = torch.ones(_COPIED, **cpu), torch.empty(_COPIED, **cpu)
        multiply_s = _fastest_s(lambda: torch.mm(square, square, out=product))
        copy_s = _fastest_s(lambda: copied.copy_(source))
    return DeviceRates(2 * _SIDE**3 / multiply_s, 2 * copied.nbytes / copy_s)


def _fastest_s(action: Callable[[], Any]) -> float:
    action()
    times = []
    for _ in range(_REPEATS):
        began_s = time.thread_time()
        action()
        times.append(time.thread_time() - began_s)
    return max(min(times), 1e-9)


# The clock is the CPU time of the thread: on a busy machine, time in which another process had the core does not count. On a GPU
# an operation takes only the time of its launch there, so only the counts of operations and bytes are meaningful there.


class OperationTimes(TorchDispatchMode):
    """A dispatch mode that times every operation; entered before other modes, so that it does not time them."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[OperationWork] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation and time it."""
        began_s = time.thread_time()
        result = func(*args, **(kwargs or {}))
        cpu_s = time.thread_time() - began_s
        count = FLOP_COUNTS.get(func.overloadpacket)
        flops = 0 if count is None else count(result, *args) * num_real_products(args)
        moved = 0 if func.is_view else _bytes((args, kwargs, result))
        self.operations.append(OperationWork(flops=flops, bytes=moved, cpu_s=cpu_s))
        return result

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Allow torch.compile under this mode."""
        return True


def _bytes(values: Any) -> int:
    found = {id(leaf): leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}
    return sum(t.numel() * t.element_size() for t in found.values() if t.layout is torch.strided)
