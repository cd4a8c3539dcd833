"""What holds a run back, as display strings."""

from __future__ import annotations

from mezzo.records import Bottleneck, GpuUse, Limit
from mezzo.report import formatting as fmt
from mezzo.report.sheets.shared import Fact, facts

BUSY = "usually above 90% if the GPU is busy"
FULL = "usually above 80% if the batch fills the GPU"
POWERED = "usually above 60% of the limit if the GPU is busy"
LIMITS: dict[Limit, str] = {
    "input": "the input",
    "waiting": "waiting",
    "communication": "communication",
    "host": "the host",
    "power": "the power limit",
    "bandwidth": "memory bandwidth",
    "arithmetic": "arithmetic",
    "unknown": "not known",
}
"""What limits a run, as a reader is told."""
_SHOWN = 0.005
"""A smaller share of the time is not shown."""
_SHARES = {
    "input": "waiting for the data loader",
    "communication": "waiting in torch.distributed",
    "waiting": "asleep: a lock, a sleep, a file, a socket",
    "preempted": "of the whole time: other threads or processes had the cores",
    "host": "Python, and launching operations",
    "bandwidth": "operations that mostly move memory",
    "arithmetic": "products",
}


def bottleneck_facts(bottleneck: Bottleneck | None) -> list[Fact]:
    """Return what holds a run back, what to change, and the measurements; empty if nothing was measured."""
    if bottleneck is None:
        return []
    rows = [held_back_by(bottleneck)]
    rows += [
        Fact(what="change", value=str(n), reason=fmt.clean(text)) for n, text in enumerate(bottleneck.change, start=1)
    ]
    rows += [
        Fact(what=name, value=fmt.share_text(bottleneck.shares[name]), reason=meaning)
        for name, meaning in _SHARES.items()
        if bottleneck.shares.get(name, 0.0) >= _SHOWN
    ]
    if bottleneck.operations is not None and bottleneck.operation_us is not None:
        mean = f"{bottleneck.operation_us:.0f} us on average on the host"
        rows.append(Fact(what="operations per step", value=str(bottleneck.operations), reason=mean))
    return [*rows, *([] if bottleneck.gpu is None else _gpu(bottleneck.gpu)), *facts(bottleneck.not_measured)]


def held_back_by(bottleneck: Bottleneck) -> Fact:
    """Return what holds a run back, and why."""
    return Fact(what="held back by", value=LIMITS[bottleneck.limit], reason=fmt.clean(bottleneck.sentence))


def _gpu(gpu: GpuUse) -> list[Fact]:
    rows = [Fact(what="GPU", value=fmt.clean(gpu.name), reason=f"{gpu.num_samples} samples, one a second")]
    if gpu.utilization is not None:
        rows.append(Fact(what="utilization", value=fmt.share_text(gpu.utilization), reason=BUSY))
    if gpu.memory_share is not None:
        rows.append(Fact(what="GPU memory", value=fmt.share_text(gpu.memory_share), reason=FULL))
    if gpu.power_w is not None:
        limit = "" if gpu.power_limit_w is None else f" of {gpu.power_limit_w:.0f}"
        rows.append(Fact(what="power", value=f"{gpu.power_w:.0f}{limit} W", reason=POWERED))
    if gpu.temperature_c is not None:
        rows.append(Fact(what="temperature", value=f"{gpu.temperature_c:.0f} C", reason="the highest"))
    if gpu.clock_mhz is not None:
        limit = "" if gpu.clock_limit_mhz is None else f" of {gpu.clock_limit_mhz:.0f}"
        rows.append(Fact(what="clock", value=f"{gpu.clock_mhz:.0f}{limit} MHz"))
    causes = ", ".join(f"{fmt.clean(reason)} in {share:.0%} of the samples" for reason, share in gpu.throttled.items())
    return [*rows, Fact(what="throttled by", value=causes or "nothing")]
